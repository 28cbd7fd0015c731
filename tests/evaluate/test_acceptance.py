"""Accepted length and acceptance by position, by hand; intervals that resample prompts within their sets."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.evaluate.acceptance import Counts, Sample, bootstrap_weights, interval, ratios, value
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
    assert found["later_pooled"][0] == 3 / 5 and found["rate"][0] == 8 / 16 and found["offered"][0] == 2.0
    assert sample.reached() == [] and np.isnan(found["later_mean"][0])  # five tries are too few for a mean


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


def sample_of(tried: list[list[float]], passed: list[list[float]]) -> Sample:
    """Counts ``[P, G]`` as they are."""
    drafts = len(tried[0])
    sample = Sample([trace([1, 1], [0, 0], index=i) for i in range(len(tried))], drafts, {})
    sample.tried, sample.passed = np.array(tried, float), np.array(passed, float)
    return sample


def test_later_positions_are_compared_where_both_drafters_have_them() -> None:
    """Blocks of 4 and of 3 drafts. Pooled over positions 2 and 3: (40 + 2) / (60 + 4) to (30 + 45) / (60 + 100). The
    plain mean takes position 2 alone: at position 3 the first has four tries. A block of one draft has no ratio."""
    mine = sample_of([[90, 60, 4, 2]], [[60, 40, 2, 2]])
    first = sample_of([[90, 60, 100]], [[60, 30, 45]])
    found = ratios(mine, first, np.ones((10, 1)))
    pooled, mean = found["later_pooled_ratio"], found["later_mean_ratio"]
    assert pooled["positions"] == [2, 3] and mean["positions"] == [2]
    assert pooled["value"] == round((42 / 64) / (75 / 160), 4) == pooled["low"]
    assert mean["value"] == round((40 / 60) / (30 / 60), 4)
    assert mine.statistics()["later_pooled"][0] == 44 / 66  # its own value takes all of its positions
    assert set(ratios(sample_of([[90]], [[60]]), first, np.ones((10, 1)))) == {"tau_ratio"}


def test_the_interval_of_the_pooled_ratio_covers_the_truth() -> None:
    """1,000 simulated comparisons of 72 prompts in three sets, 40 blocks of 7 drafts a prompt. Prompts are easy or hard
    for both drafters, and few blocks reach the last positions. The truth is the quotient of expected counts.

    A 95 % interval that covers 950 in the mean has a standard deviation of 6.9; percentile intervals of 72 prompts are
    known to cover a little less, about 940 here. Fewer than 915 or more than 975 are then seen with probability below
    0.001; the draws are fixed. The mean over the positions that both reached often has nearly twice the width. (Over
    all positions that a resample happened to reach, these draws gave 4.6 times the width, and covered 792.)
    """
    rng, trials, blocks, per_set = np.random.default_rng(5), 1000, 40, 24
    hard = np.array([0.75, 1.1])  # factor of a prompt's acceptance; both are as frequent
    rates = {"mine": np.full(7, 0.55), "first": 0.45 * 0.9 ** np.arange(7)}
    sample = {name: sample_of([[0.0] * 7] * (3 * per_set), [[0.0] * 7] * (3 * per_set)) for name in rates}
    suites = np.repeat(["a", "b", "c"], per_set)
    weights = bootstrap_weights(suites, 400)

    def survival(name: str, factor: np.ndarray) -> np.ndarray:  # [P, 8] chance that a block accepts k drafts or more
        each = np.clip(factor[:, None] * rates[name], 0, 1)
        return np.concatenate([np.ones((len(factor), 1)), np.cumprod(each, axis=1)], axis=1)

    expected = {name: survival(name, hard).mean(0) for name in rates}
    share = {name: e[2:].sum() / e[1:-1].sum() for name, e in expected.items()}
    truth = share["mine"] / share["first"]
    covered, widths = 0, {"later_pooled_ratio": 0.0, "later_mean_ratio": 0.0}
    for _ in range(trials):
        factor = hard[rng.integers(0, 2, 3 * per_set)]
        for name, one in sample.items():
            reach = survival(name, factor)
            lengths = np.concatenate([reach[:, :-1] - reach[:, 1:], reach[:, -1:]], axis=1)  # [P, 8] accepted drafts
            counts = rng.multinomial(blocks, lengths)
            above = counts[:, ::-1].cumsum(1)[:, ::-1]
            one.tried, one.passed = above[:, :-1].astype(float), above[:, 1:].astype(float)
        found = ratios(sample["mine"], sample["first"], weights)
        covered += found["later_pooled_ratio"]["low"] <= truth <= found["later_pooled_ratio"]["high"]
        for name in widths:
            widths[name] += (found[name]["high"] - found[name]["low"]) / trials
    assert 915 <= covered <= 975
    assert widths["later_pooled_ratio"] < 0.7 * widths["later_mean_ratio"]
