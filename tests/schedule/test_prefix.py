"""The prefix scheduler against the oracle, against a literal loop of the paper's Algorithm 1, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.schedule import prefix
from dspark_jax.schedule.step_time import StepTimeTable
from tests.oracle import oracle_dir


def staircase(*milliseconds: float, first: int = 1) -> StepTimeTable:
    """A table with an entry for every token count from `first` on."""
    return StepTimeTable(tokens=range(first, first + len(milliseconds)), milliseconds=milliseconds)


def order(survival: np.ndarray) -> list[tuple[int, int]]:
    """The admission order written down: higher survival, lower slot, lower position; no zeros."""
    slots, width = survival.shape
    cells = [(-float(survival[r, k]), r, k) for r in range(slots) for k in range(width) if survival[r, k] > 0]
    return [(r, k) for _, r, k in sorted(cells)]


def literal(
    survival: np.ndarray, table: StepTimeTable, draft_ms: float, draft_paid: bool, other: int, full: bool
) -> tuple[np.ndarray, int]:
    """Algorithm 1 (`full=False`) or the search of the whole path, one admission after the other."""
    requests = survival.shape[0]
    expected, tokens = float(requests), requests + other
    skip = full and not draft_paid
    best = expected / (table.ms(tokens) if skip else draft_ms + table.ms(tokens))
    lengths, chosen, admitted = np.zeros(requests, np.int32), np.zeros(requests, np.int32), 0
    for slot, _ in order(survival):
        tokens += 1
        if tokens > table.tokens[-1]:
            break
        expected += float(survival[slot, lengths[slot]])
        theta = expected / (draft_ms + table.ms(tokens))
        lengths[slot] += 1
        if theta > best:
            best, chosen, admitted = theta, lengths.copy(), int(lengths.sum())
        elif not full:
            break
    return chosen, admitted


def random_survival(rng: np.random.Generator, slots: int, width: int) -> np.ndarray:
    """Rows with exact ties inside and between them, ones, zeros and whole rows of zeros."""
    kind = rng.integers(4)
    if kind == 0:
        conditional = rng.uniform(0.2, 1.0, (slots, width))
    elif kind == 1:  # few distinct values, exact in binary: many ties
        conditional = rng.choice([1.0, 0.5, 0.0], (slots, width), p=[0.6, 0.35, 0.05])
    elif kind == 2:
        conditional = np.tile(rng.choice([1.0, 0.9, 0.75], width), (slots, 1))
    else:
        conditional = rng.uniform(0.0, 1.0, (slots, width)) * (rng.random((slots, width)) > 0.2)
    conditional = conditional * (rng.random((slots, 1)) > 0.15)
    values = np.cumprod(conditional, axis=1)
    return values.astype(np.float32) if rng.random() < 0.5 else values


def random_table(rng: np.random.Generator, first: int, last: int) -> StepTimeTable:
    """Plateaus, dips and jumps over a random subset of the token counts; the last one may be missing."""
    counts = np.arange(first, last + 1)
    listed = counts[rng.random(counts.size) < rng.choice([0.3, 1.0])]
    if listed.size == 0:
        listed = counts[-1:]
    if rng.random() < 0.5:  # small integers: plateaus and exact ties of theta
        ms = rng.integers(1, 5, listed.size).astype(float)
    else:
        ms = 1.0 + 0.05 * listed * rng.uniform(0.5, 1.5, listed.size)
    return StepTimeTable(tokens=listed, milliseconds=ms)


def random_cases(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(20260705)
    cases = []
    for _ in range(count):
        slots, width = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        other = int(rng.integers(0, 4)) * int(rng.random() < 0.4)
        table = random_table(rng, slots + other, slots * (1 + width) + other)
        cases.append(
            dict(
                survival=random_survival(rng, slots, width),
                table=table,
                draft_ms=float(rng.choice([0.0, 0.5, 2.0])),
                other=other,
            )
        )
    return cases


def test_appendix_a_early_stop_is_blind_to_what_follows_and_the_search_is_not() -> None:
    """The paper's example: one request, survivals (0.8, s), 1, 0.5, 0.45 steps per second for 1, 2, 3 tokens.

    By hand: theta = 1, then 1.8 * 0.5 = 0.9, then (1.8 + s) * 0.45. With s = 0.72 the last is 1.134 > 1, so
    the search verifies both drafts; with s = 0 it verifies none. Algorithm 1 stops at 0.9 < 1 either way, and
    what it does about the first draft does not depend on the second.
    """
    table = staircase(1 / 1.0, 1 / 0.5, 1 / 0.45)
    high, low = np.array([[0.8, 0.72]]), np.array([[0.8, 0.0]])
    assert prefix.admit_early_stop(high, table).tolist() == [0]
    assert prefix.admit_early_stop(low, table).tolist() == [0]
    assert prefix.capacity(high, table) == 2
    assert prefix.capacity(low, table) == 0


def test_every_oracle_case_is_met_exactly() -> None:
    """Lengths, number admitted and theta: smooth, staircase, jagged, flat and steep step times, ties."""
    cases = np.load(oracle_dir() / "scheduler" / "cases.npz")
    for j in range(int(cases["num_cases"])):
        name = f"c{j:03d}."
        survival, sps = cases[name + "survival"], cases[name + "sps"]
        requests = survival.shape[0]
        label = f"{name}{cases[name + 'kind']}"
        table = StepTimeTable(tokens=range(requests, sps.size), milliseconds=1.0 / sps[requests:])
        lengths = prefix.admit_early_stop(survival, table)
        assert lengths.tolist() == cases[name + "alg1.lengths"].tolist(), label
        admitted = prefix.capacity(survival, table)
        assert admitted == int(cases[name + "full.admitted"]), label
        best = prefix.admit_top_k(survival, admitted)
        assert best.tolist() == cases[name + "full.lengths"].tolist(), label
        for rule, got in (("alg1", lengths), ("full", best)):
            chosen = np.arange(survival.shape[1]) < got[:, None]
            theta = (requests + survival.astype(float)[chosen].sum()) * sps[requests + int(got.sum())]
            assert theta == pytest.approx(float(cases[f"{name}{rule}.theta"]), rel=1e-12), label
        for k, expected in zip(cases[name + "topk.K"], cases[name + "topk.lengths"], strict=True):
            assert prefix.admit_top_k(survival, k).tolist() == expected.tolist(), label


def test_random_tables_with_ties_zeros_and_plateaus_agree_with_a_literal_loop() -> None:
    """The vectorised search and the loop, with draft time and prefill tokens in the same forward."""
    for case in random_cases(400):
        survival, table, draft_ms, other = case["survival"], case["table"], case["draft_ms"], case["other"]
        if survival.shape[0] + other > table.last:
            continue
        expected, _ = literal(survival, table, draft_ms, False, other, full=False)
        got = prefix.admit_early_stop(survival, table, draft_ms, other_tokens=other)
        assert got.dtype == np.int32
        assert got.tolist() == expected.tolist(), case
        for paid in (False, True):
            lengths, admitted = literal(survival, table, draft_ms, paid, other, full=True)
            k = prefix.capacity(survival, table, draft_ms, draft_paid=paid, other_tokens=other)
            assert k == admitted, case
            assert prefix.admit_top_k(survival, k).tolist() == lengths.tolist(), case


def test_early_stop_does_not_look_behind_the_draft_it_refuses() -> None:
    """Non-anticipation (Appendix A): erase all candidates after the first refused one: no change."""
    erased = 0
    for case in random_cases(100):
        survival, table, draft_ms, other = case["survival"], case["table"], case["draft_ms"], case["other"]
        if survival.shape[0] + other > table.last:
            continue
        lengths = prefix.admit_early_stop(survival, table, draft_ms, other_tokens=other)
        known = survival.copy()
        for slot, position in order(survival)[int(lengths.sum()) + 1 :]:
            known[slot, position] = 0.0
            erased += 1
        again = prefix.admit_early_stop(known, table, draft_ms, other_tokens=other)
        assert again.tolist() == lengths.tolist()
    assert erased > 500


def test_top_k_lengths_are_the_first_k_of_the_admission_order() -> None:
    """For every k: count the first k cells of the written-down order row by row."""
    for case in random_cases(60):
        survival = case["survival"]
        candidates = order(survival)
        for k in range(survival.size + 2):
            expected = np.bincount([r for r, _ in candidates[:k]], minlength=survival.shape[0])
            assert prefix.admit_top_k(survival, k).tolist() == expected.tolist()


def test_ties_go_to_the_lower_slot_and_then_the_lower_position() -> None:
    """All survivals 1/2: five admissions fill slot 0, then two positions of slot 1."""
    survival = np.full((3, 3), 0.5)
    assert prefix.admit_top_k(survival, 5).tolist() == [3, 2, 0]
    assert prefix.admit_top_k_device(jnp.asarray(survival, jnp.float32), 5).tolist() == [3, 2, 0]


def test_survival_zero_is_never_admitted() -> None:
    """A request outside the draft batch is a row of zeros: it counts in R, and no budget gives it a draft."""
    survival = np.array([[0.5, 0.0], [0.0, 0.0]])
    flat = staircase(*[1.0] * 6)
    assert prefix.admit_top_k(survival, 100).tolist() == [1, 0]
    assert prefix.admit_early_stop(survival, flat).tolist() == [1, 0]
    assert prefix.capacity(survival, flat) == 1


def test_capacity_prefers_the_smallest_number_among_equal_thetas() -> None:
    """theta 1/1, 2/2, 3/3 for 0, 1, 2 drafts: equal, so none. Then 1/1, 2/1, 2.5/1.25: one."""
    ones = np.ones((1, 2))
    assert prefix.capacity(ones, staircase(1.0, 2.0, 3.0)) == 0
    assert prefix.capacity(np.array([[1.0, 0.5]]), staircase(1.0, 1.0, 1.25)) == 1


def test_draft_time_counts_against_drafting_unless_it_is_paid() -> None:
    """One request, one certain draft, ms = 1 and 1.5, a draft of 1 ms.

    Not paid: 1 / 1 = 1 against 2 / 2.5 = 0.8, so the draft is skipped. Paid: 1 / 2 against 0.8, so it is
    verified, by the search and by early stop alike.
    """
    survival, table = np.array([[1.0]]), staircase(1.0, 1.5)
    assert prefix.capacity(survival, table, 1.0) == 0
    assert prefix.capacity(survival, table, 1.0, draft_paid=True) == 1
    assert prefix.admit_early_stop(survival, table, 1.0).tolist() == [1]


def test_other_tokens_move_every_count() -> None:
    """ms = 1, 1, 9: a request alone gets one draft; beside a prefill token the draft would cost 9."""
    survival, table = np.array([[0.9]]), staircase(1.0, 1.0, 9.0)
    assert prefix.capacity(survival, table) == 1
    assert prefix.capacity(survival, table, other_tokens=1) == 0
    assert prefix.admit_early_stop(survival, table, other_tokens=1).tolist() == [0]


def test_drafts_beyond_the_last_entry_are_not_considered() -> None:
    """A flat table that ends at four tokens: two requests get two drafts in all, though more would pay."""
    survival = np.full((2, 4), 1.0)
    table = staircase(1.0, 1.0, 1.0, 1.0)
    assert prefix.capacity(survival, table) == 2
    assert prefix.admit_early_stop(survival, table).tolist() == [2, 0]


def test_requests_beyond_the_last_entry_are_an_error_that_names_it() -> None:
    survival, table = np.ones((3, 1)), staircase(1.0, 1.0)
    for call in (prefix.capacity, prefix.admit_early_stop):
        with pytest.raises(ValueError, match=r"R = 3 requests are beyond the last entry .*\(2 tokens\)"):
            call(survival, table)
        with pytest.raises(ValueError, match=r"R = 1 requests \+ 2 other tokens are beyond .*\(2 tokens\)"):
            call(survival[:1], table, other_tokens=2)


def test_survival_is_the_running_product_in_float64() -> None:
    got = prefix.survival(np.array([[0.5, 0.5, 1.0], [1.0, 0.0, 0.7]], np.float32))
    assert got.dtype == np.float64
    assert got.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("bad", [[[1.5, 0.5]], [[0.5, -0.1]], [[np.nan, 0.5]], [[0.5, np.inf]], [0.5, 0.4]])
def test_survival_refuses_what_is_no_probability(bad: Any) -> None:
    """Confidence logits handed over by mistake are the usual cause."""
    with pytest.raises(ValueError, match="confidence"):
        prefix.survival(np.array(bad))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([[0.5, 0.6]], r"survival\[0\]: rows must be non-increasing, but position 1 has 0.6 after 0.5"),
        ([[1.0, 1.0], [0.2, 0.3]], r"survival\[1\]: rows must be non-increasing"),
        ([[1.1, 0.5]], r"survival\[0, 0\] = 1.1"),
        ([[0.5, -0.1]], r"survival\[0, 1\] = -0.1"),
        ([[0.5, np.nan]], r"survival\[0, 1\] = nan"),
        ([[np.nan, np.nan]], r"survival\[0, 0\] = nan"),
        ([[np.inf, 0.5]], r"survival\[0, 0\] = inf"),
        ([0.5, 0.4], r"shape \[S, G\] expected, got \[2\]"),
    ],
)
def test_rows_that_are_no_survivals_are_refused_by_name(rows: Any, match: str) -> None:
    """Exactness of lagged top-K needs non-increasing rows (DESIGN section 3), so every call checks."""
    table = staircase(*[1.0] * 9)
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda s: prefix.capacity(s, table),
        lambda s: prefix.admit_early_stop(s, table),
        lambda s: prefix.admit_top_k(s, 1),
    )
    for call in calls:
        with pytest.raises(ValueError, match=match):
            call(np.array(rows))


def test_malformed_scalars_are_refused_by_name() -> None:
    survival, table = np.ones((1, 1)), staircase(1.0, 1.0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="draft_ms"):
            prefix.capacity(survival, table, bad)
    with pytest.raises(ValueError, match="other_tokens"):
        prefix.admit_early_stop(survival, table, other_tokens=-1)
    with pytest.raises(ValueError, match="k: a number of drafts"):
        prefix.admit_top_k(survival, -1)
    with pytest.raises(TypeError):
        prefix.admit_top_k(survival, 1.5)  # type: ignore[arg-type]


def test_no_requests_and_no_positions_admit_nothing() -> None:
    table = staircase(1.0)
    for shape in ((0, 3), (2, 0)):
        empty = np.zeros(shape)
        assert prefix.capacity(empty, table) == 0
        assert prefix.admit_early_stop(empty, table).tolist() == [0] * shape[0]
        assert prefix.admit_top_k(empty, 5).tolist() == [0] * shape[0]
        on_device = jnp.zeros(shape)
        assert prefix.survival_device(on_device).shape == shape
        assert prefix.admit_top_k_device(on_device, 5).tolist() == [0] * shape[0]
        active = jnp.ones(shape[0], bool)
        assert prefix.admit_early_stop_device(on_device, jnp.ones(4), 0.0, active).tolist() == [0] * shape[0]


@pytest.mark.parametrize("library", [np, jnp])
def test_threshold_cuts_before_the_first_low_position(library: Any) -> None:
    """Per position, not cumulative; equal to the threshold is kept; all after the first low one is cut."""
    conditional = library.array([[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9]])
    got = prefix.admit_threshold(conditional, 0.5)
    assert got.dtype == np.int32
    assert got.tolist() == [3, 0, 3]
    assert prefix.admit_threshold(conditional, 0.6).tolist() == [1, 0, 3]
    assert prefix.admit_threshold(conditional, 0.0).tolist() == [3, 3, 3]


def test_device_top_k_equals_the_host_for_every_k() -> None:
    """One program per shape, k traced; float32 values, so that ties are ties on both sides."""
    on_device = jax.jit(prefix.admit_top_k_device)
    rng = np.random.default_rng(1)
    for _ in range(40):
        survival = random_survival(rng, 5, 4).astype(np.float32)
        for k in (0, 1, 2, 7, 13, 20, 99):
            expected = prefix.admit_top_k(survival, k).tolist()
            assert on_device(survival, jnp.int32(k)).tolist() == expected


def test_device_early_stop_equals_the_host_where_theta_is_exact() -> None:
    """Survivals in sixteenths and step times in powers of two: theta has no rounding in float32.

    Idle slots are filled with ones on the device and left out on the host: they must not count.
    """
    on_device = jax.jit(prefix.admit_early_stop_device)
    rng = np.random.default_rng(2)
    slots, width, size = 6, 4, 24  # at most 30 tokens: the table may end before that
    seen = set()
    for _ in range(200):
        survival = -np.sort(-rng.integers(0, 17, (slots, width)), axis=1).astype(np.float32) / 16
        active = rng.random(slots) < 0.7
        listed = np.flatnonzero(rng.random(size - slots) < 0.6) + slots
        listed = np.append(listed, size)
        table = StepTimeTable(tokens=listed, milliseconds=2.0 ** np.sort(rng.integers(0, 3, listed.size)))
        expected = np.zeros(slots, np.int32)
        expected[active] = prefix.admit_early_stop(survival[active], table)
        rows = np.where(active[:, None], survival, np.float32(1.0))
        dense = jnp.asarray(table.dense(size + 2), jnp.float32)
        assert on_device(rows, dense, jnp.float32(0.0), active).tolist() == expected.tolist()
        seen.add(int(expected.sum()))
    assert len(seen) > 5, "the cases do not vary"


def test_device_early_stop_pays_the_draft_on_both_sides() -> None:
    """ms = 1, 1.5, 4, a draft of 1 ms, one request of survivals (1, 1): 1/2 < 2/2.5 > 3/5, so one draft."""
    dense = jnp.array([1.0, 1.0, 1.5, 4.0])
    active = jnp.array([True])
    assert prefix.admit_early_stop_device(jnp.ones((1, 2)), dense, 1.0, active).tolist() == [1]
    # Without draft time: 1/1 < 2/1.5 > 3/4 too; with a huge one everything pays.
    assert prefix.admit_early_stop_device(jnp.ones((1, 2)), dense, 100.0, active).tolist() == [2]


def test_device_early_stop_meets_the_oracle_away_from_near_ties() -> None:
    """Cases decided by more than 1e-4 of theta, and the deliberate ties, which are exact in binary.

    All in one program of 64 slots and 16 positions: slots that are not active and positions of survival 0 are
        padding.
    """
    on_device = jax.jit(prefix.admit_early_stop_device)
    cases = np.load(oracle_dir() / "scheduler" / "cases.npz")
    compared = 0
    for j in range(int(cases["num_cases"])):
        name = f"c{j:03d}."
        if 0 < float(cases[name + "alg1.gap"]) < 1e-4:
            continue
        survival, sps = cases[name + "survival"], cases[name + "sps"]
        requests, width = survival.shape
        rows = np.zeros((64, 16), np.float32)
        rows[:requests, :width] = survival
        ms = np.full(64 * 17 + 1, np.inf, np.float32)
        ms[requests : sps.size] = 1.0 / sps[requests:]
        got = on_device(rows, ms, jnp.float32(0.0), np.arange(64) < requests)
        expected = cases[name + "alg1.lengths"]
        assert got[:requests].tolist() == expected.tolist(), f"{name}{cases[name + 'kind']}"
        assert not got[requests:].any()
        compared += 1
    assert compared > 80


def test_device_survival_is_accepted_by_the_host_and_equals_it() -> None:
    """Left-to-right products never increase, in float32 too, which the host functions insist on."""
    conditional = np.random.default_rng(3).uniform(0.9, 1.0, (64, 16)).astype(np.float32)
    on_device = np.asarray(jax.jit(prefix.survival_device)(conditional))
    assert (np.diff(on_device, axis=1) <= 0).all()
    np.testing.assert_allclose(on_device, prefix.survival(conditional), rtol=2e-6)
    prefix.admit_top_k(on_device, 3)
