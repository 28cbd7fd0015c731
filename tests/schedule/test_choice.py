"""The capacity search under conditions, against its definition on every small case."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dspark_jax.schedule import StepTimeTable, capacity
from dspark_jax.schedule.choice import _order, _slowest, choose

LEVELS = (0.0, 0.25, 0.5, 1.0)  # sums of these are exact, so ties are ties
ROWS = [row for row in itertools.product(LEVELS, repeat=2) if row[0] >= row[1]]
TABLES = (
    [1.0, 1.0, 1.0, 1.0, 1.0],
    [1.0, 1.25, 1.5, 1.75, 2.0],
    [1.0, 2.0, 2.0, 1.0, 4.0],
    [1.0, 1.0, 2.0],  # ends early
)


def literal(
    rows: tuple[tuple[float, ...], ...],
    ms: list[float],
    draft_ms: float,
    paid: bool,
    gain: float,
    floor: float,
    other_ms: float,
) -> int:
    """By the words: the numbers of drafts whose theta exceeds that of none by the gain, and none itself; of these those
    that keep the floor, or where none does those that serve the slowest best; of these the best theta, the first."""
    requests = len(rows)
    order = sorted((-s, r, k) for r, row in enumerate(rows) for k, s in enumerate(row) if s > 0)
    states = []
    for count in range(min(len(order), len(ms) - 1) + 1):
        tokens = [1.0] * requests
        for negative, slot, _ in order[:count]:
            tokens[slot] -= negative
        cost = ms[count] + (draft_ms if count or paid else 0.0)
        states.append((sum(tokens) / cost, min(tokens) / (other_ms + cost)))
    allowed = [n for n, (theta, _) in enumerate(states) if n == 0 or theta > (1 + gain) * states[0][0]]
    if floor:
        kept = [n for n in allowed if states[n][1] >= floor]
        best = max(states[n][1] for n in allowed)
        allowed = kept or [n for n in allowed if states[n][1] == best]
    return max(allowed, key=lambda n: (states[n][0], -n))


@pytest.mark.parametrize("ms", TABLES)
def test_every_small_case_is_what_the_definition_says(ms: list[float]) -> None:
    """Two requests, two drafts, ties and zeros, four tables, with and without each condition: 4,000 decisions each."""
    table = StepTimeTable(tokens=range(2, 2 + len(ms)), milliseconds=ms)
    for rows in itertools.product(ROWS, repeat=2):
        for draft_ms, paid, gain, (floor, other) in itertools.product(
            (0.0, 0.25), (False, True), (0.0, 0.25), ((0.0, 0.0), (0.75, 0.0), (1.5, 0.0), (0.0, 0.5), (0.75, 0.5))
        ):
            got = choose(
                np.array(rows), table, draft_ms, draft_paid=paid, min_gain=gain, floor_per_ms=floor, other_ms=other
            )
            wanted = literal(rows, ms, draft_ms, paid, gain, floor, other)
            assert got.drafts == wanted, (rows, draft_ms, paid, gain, floor, other)
            if not gain and not floor:
                assert got.drafts == capacity(np.array(rows), table, draft_ms, draft_paid=paid)
            assert got.step_ms == ms[got.drafts] + (draft_ms if got.drafts or paid else 0.0)


@pytest.mark.parametrize("gain", [0.0, 0.5])
def test_the_edge_is_where_one_more_draft_begins_to_pay(gain: float) -> None:
    """Nothing admitted: a first draft of a little more survival would be, and of a little less would not. Admitted: the
    survival of the last one."""
    table = StepTimeTable(tokens=[2, 3], milliseconds=[1.0, 1.1 / (1 + gain)])
    none = choose(np.array([[0.05], [0.0]]), table, 0.1, min_gain=gain)
    assert none.drafts == 0 and none.edge == pytest.approx(2 * (0.1 * (1 + gain) + 1.1) - 2)
    for survival, drafts in ((none.edge - 1e-6, 0), (none.edge + 1e-6, 1)):
        assert choose(np.array([[survival], [0.0]]), table, 0.1, min_gain=gain).drafts == drafts
    free = StepTimeTable(tokens=[2, 6], milliseconds=[1.0, 1.0])
    assert choose(np.array([[0.9, 0.4], [0.7, 0.0]]), free).edge == 0.4
    assert choose(np.array([[0.9]]), StepTimeTable(tokens=[1], milliseconds=[1.0])).edge == math.inf


def test_pieces_of_prompts_are_no_price_of_a_draft() -> None:
    """Half of a second beside every cycle: 8 drafts make that step's own rate largest, 2 are best for all. 64 pieces of
    prompts, and 2,000 tokens after and between them: whatever is drafted, the 64 pieces are run, so that all is done
    soonest with the drafts that would be best without them (each number of drafts is tried)."""
    table = StepTimeTable(tokens=range(1, 10), milliseconds=[1.0, 1.1, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7, 3.0])
    rows = 0.8 ** np.arange(1, 9)[None]
    tokens = 1.0 + np.concatenate([[0.0], np.cumsum(rows[0])])
    assert int(np.argmax(tokens / (500.0 + table.milliseconds))) == 8

    def all_done_ms(beside: int, after: int) -> float:
        left = 2000.0 - 64 * tokens[beside]
        return 64 * (500.0 + table.milliseconds[beside]) + left / tokens[after] * table.milliseconds[after]

    best = min(itertools.product(range(9), repeat=2), key=lambda drafts: all_done_ms(*drafts))
    assert best == (2, 2)
    assert choose(rows, table).drafts == choose(rows, table, other_ms=500.0).drafts == 2


def test_a_floor_counts_what_prompts_take_of_a_step() -> None:
    """Two drafts are best for all and leave the first request with 1 token in 1 ms, four give it 2.52 in 2.1 ms. A
    floor of 0.8 tokens a millisecond is kept by both. With a piece of 1 ms in the step only four keep it (1 / 2 and
    2.52 / 3.1); with one of 3 ms nothing does, and four serve the first request best (1 / 4 and 2.52 / 5.1)."""
    table = StepTimeTable(tokens=[4, 5, 6], milliseconds=[1.0, 2.0, 2.1])
    rows = np.array([[0.8, 0.72], [0.99, 0.98]])
    for other_ms, drafts in ((0.0, 2), (1.0, 4), (3.0, 4)):
        assert choose(rows, table, floor_per_ms=0.8, other_ms=other_ms).drafts == drafts
    with pytest.raises(ValueError, match="other_ms: a finite number of milliseconds >= 0"):
        choose(rows, table, other_ms=math.nan)


def close(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Survivals that differ in their last bits alone: 2^-52 apart, around 1/2 and below."""
    steps = rng.integers(0, 4, shape).cumsum(axis=1)
    return 0.5 - 2.0**-53 * steps


BATCHES = {
    "ties": lambda rng, shape: np.cumprod(rng.integers(0, 5, shape) / 4, axis=1),
    "last bits": close,
    "float32": lambda rng, shape: np.cumprod(rng.random(shape), axis=1).astype(np.float32),
    "any": lambda rng, shape: np.cumprod(rng.uniform(0.5, 1.0, shape), axis=1),
    "minus zero": lambda rng, shape: np.where(np.arange(shape[1]) < rng.integers(0, 3, (shape[0], 1)), 0.5, -0.0),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_floor_keeps_the_order_of_admission(kind: str) -> None:
    """Who is served worst after n drafts, of batches up to 24 x 6: as the literal loop finds it, for ties (lower slot,
    lower position), for survivals whose order shows in their last bits only, and for zeros of both signs."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        shape = int(rng.integers(1, 25)), int(rng.integers(1, 7))
        rows = BATCHES[kind](rng, shape)
        values, places = _order(rows)
        count = np.count_nonzero(values)
        order = sorted((-float(s), r, k) for r, row in enumerate(rows) for k, s in enumerate(row) if s > 0)
        assert [divmod(int(place), shape[1] + 1) for place in places[:count]] == [(r, k) for _, r, k in order]
        np.testing.assert_array_equal(values[:count], [-s for s, _, _ in order])
        tokens, fewest = np.ones(shape[0]), [1.0]
        totals = 1.0 + np.cumsum(rows, axis=1, dtype=np.float64)
        for _, r, k in order:
            tokens[r] = totals[r, k]
            fewest.append(tokens.min())
        np.testing.assert_array_equal(_slowest(rows, places, count + 1), fewest)
        np.testing.assert_array_equal(_slowest(rows, places, count // 2 + 1), fewest[: count // 2 + 1])


def test_conditions_are_not_negative() -> None:
    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 1.0])
    for wrong in ({"min_gain": -0.1}, {"floor_per_ms": -1.0}, {"min_gain": math.nan}):
        with pytest.raises(ValueError, match="min_gain and floor_per_ms"):
            choose(np.array([[0.5]]), table, **wrong)
    assert choose(np.zeros((0, 2)), StepTimeTable(tokens=[0, 1], milliseconds=[1.0, 1.0])).drafts == 0
