"""Accepted length and acceptance by position, by hand; intervals that resample prompts within their sets."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.evaluate.acceptance import Counts, Sample, bootstrap_weights, interval, value
from dspark_jax.evaluate.decode import Trace


def trace(committed: list[int], offered: list[int], finish: str = "length", suite: str = "a", index: int = 0) -> Trace:
    tokens = tuple(range(1 + sum(committed)))
    return Trace(suite, index, tokens, tuple(committed), tuple(offered), finish, 1.0, len(tokens))


def test_the_last_cycle_counts_only_where_a_stop_token_ended_the_text() -> None:
    """[3, 1, 2] of blocks of 2: reaching the limit cut the last cycle, (3 + 1) / 2; a stop did not, 6 / 3. By position
    both leave it out: draft 1 was accepted in 1 of 2 blocks, draft 2 in the 1 that got there."""
    limit = Counts.of(trace([3, 1, 2], [2, 2, 2]), 2)
    stop = Counts.of(trace([3, 1, 2], [2, 2, 2], "stop"), 2)
    assert (limit.kept, limit.cycles, stop.kept, stop.cycles) == (4, 2, 6, 3)
    for counts in (limit, stop):
        np.testing.assert_array_equal(counts.tried, [2, 1])
        np.testing.assert_array_equal(counts.passed, [1, 1])
        np.testing.assert_array_equal(counts.histogram, [1, 0, 1])


def test_a_draft_that_was_not_offered_was_not_rejected() -> None:
    """A block cut to one draft that was accepted says nothing about draft 2."""
    counts = Counts.of(trace([2, 1, 1], [1, 0, 2]), 2)
    np.testing.assert_array_equal(counts.tried, [1, 0])
    np.testing.assert_array_equal(counts.passed, [1, 0])


@pytest.mark.parametrize(
    ("committed", "offered", "extra"), [([3, 1], [1, 1], 0), ([2, 1], [3, 1], 0), ([2, 1], [2], 0), ([2, 1], [2, 2], 1)]
)
def test_a_record_that_contradicts_itself_is_refused(committed: list[int], offered: list[int], extra: int) -> None:
    bad = trace(committed, offered)
    bad = Trace(bad.suite, 3, bad.tokens + (0,) * extra, bad.committed, bad.offered, "length", 1.0, 1)
    with pytest.raises(ValueError, match="a 3: "):
        Counts.of(bad, 2)


def test_the_macro_mean_takes_one_value_a_group() -> None:
    """Sets a: 4 / 2 cycles; b: 3 / 3 and c: 9 / 3, one group: 12 / 6. Macro mean (2 + 2) / 2; all 16 / 8 = 2; with
    prompt c twice, b and c are 21 / 9."""
    traces = [
        trace([2, 2, 1], [2] * 3, suite="a"),
        trace([1, 1, 1, 1], [2] * 4, suite="b"),
        trace([3, 3, 3, 1], [2] * 4, suite="c"),
    ]
    sample = Sample(traces, 2, {"b": "bc", "c": "bc"})
    found = sample.statistics()
    assert {k: v[0] for k, v in found.items() if k.startswith("tau/")} == {
        "tau/a": 2.0,
        "tau/b": 1.0,
        "tau/c": 3.0,
        "tau/macro": 2.0,
        "tau/all": 2.0,
    }
    assert sample.statistics(np.array([[1.0, 1.0, 2.0]]))["tau/macro"][0] == pytest.approx((2 + 21 / 9) / 2)
    # Blocks (the last of each text left out): 2 of 1 accepted draft, 3 of none, 3 of two.
    np.testing.assert_allclose(found["conditional"][0], [5 / 8, 3 / 5])
    assert (
        found["later"][0] == found["later_pooled"][0] == 3 / 5
        and found["rate"][0] == 8 / 16
        and found["offered"][0] == 2.0
    )


def test_plain_decoding_has_accepted_length_one_and_no_positions() -> None:
    found = Sample([trace([1, 1, 1], [0, 0, 0])], 0, {}).statistics()
    assert found["tau/macro"][0] == 1.0 and found["conditional"].shape == (1, 0)
    assert np.isnan(found["rate"][0]) and value(float("nan"), 1.0, 2.0)["value"] is None


def test_the_bootstrap_draws_prompts_within_their_sets_and_alike_for_all() -> None:
    """Every resample has as many prompts of each set as there are. The width of the interval of a mean of 100 values is
    that of 2 * 1.96 standard errors: within 15 % (the standard deviation of an estimated quantile is about 2 %)."""
    suites = np.array(["a"] * 100 + ["b"] * 3)
    weights = bootstrap_weights(suites, 4000)
    assert (weights[:, :100].sum(1) == 100).all() and (weights[:, 100:].sum(1) == 3).all()
    np.testing.assert_array_equal(weights, bootstrap_weights(suites, 4000))
    values = np.random.default_rng(0).normal(size=100)
    low, high = interval(weights[:, :100] @ values / 100)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 10, rel=0.15)
