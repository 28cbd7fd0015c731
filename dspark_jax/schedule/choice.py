"""The capacity search with the conditions of a real engine: a least gain, a floor under each request's speed.

Everything is computed from the survivals that are handed in. Where those are older than the blocks to be decided
about, so is the decision: no condition may look at newer scores (DESIGN section 2, idea 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dspark_jax.schedule.prefix import _admission_path, _candidates, _survival_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from dspark_jax.schedule.step_time import StepTimeTable


@dataclass(frozen=True)
class Choice:
    """A capacity and what it was chosen for.

    Attributes:
        drafts: to admit over all requests.
        edge: survival below which a draft is not worth its place: that of the last one admitted; where none is, the
            survival at which one more draft would pay (above 1 where not even a certain one does).
        step_ms: predicted milliseconds of the cycle, the draft included where there are drafts.
        worth: by which choices for the same requests compare (blocks of several widths): the slowest request's tokens
            per millisecond as far as the floor asks for them, then theta.
    """

    drafts: int
    edge: float
    step_ms: float
    worth: tuple[float, float] = (0.0, 0.0)


def choose(
    survival: ArrayLike,
    table: StepTimeTable,
    draft_ms: float = 0.0,
    *,
    draft_paid: bool = False,
    min_gain: float = 0.0,
    floor_per_ms: float = 0.0,
    other_ms: float = 0.0,
) -> Choice:
    """``capacity`` under two conditions; without them its ``drafts`` are that function's.

    Args:
        survival, table, draft_ms, draft_paid: as in ``capacity``.
        min_gain: drafts are admitted only where theta exceeds that of none by this share.
        floor_per_ms: expected tokens per millisecond that the slowest request shall have (the paper's tokens/s/user,
            sec. 5.2). Among the numbers of drafts that keep it the best theta is chosen; where none keeps it, the one
            that serves the slowest request best.
        other_ms: milliseconds that programs of their own (pieces of prompts) add to the step whatever is admitted. They
            slow every request down, so the floor counts them. Theta does not: a prompt has so many pieces whatever is
            drafted beside them, so their time is no price of a draft. All work takes (pieces) x other_ms + (tokens)
            / theta milliseconds, and is done soonest where theta without them is largest.

    Raises:
        ValueError: as ``capacity``, and for a negative min_gain, floor_per_ms or other_ms.
    """
    if not 0.0 <= other_ms < math.inf:
        raise ValueError(f"other_ms: a finite number of milliseconds >= 0 expected, got {other_ms}")
    if not (min_gain >= 0.0 and floor_per_ms >= 0.0):
        raise ValueError(f"min_gain and floor_per_ms: numbers >= 0 expected, got {min_gain} and {floor_per_ms}")
    rows = _survival_rows(survival)
    requests = rows.shape[0]
    if floor_per_ms > 0.0:
        values, places = _order(rows)
        values = values[: np.count_nonzero(values)]
    else:
        values, places = _candidates(rows), None
    expected, step_ms = _admission_path(requests, values, table, draft_ms, 0)
    cost_ms = draft_ms + step_ms
    if not draft_paid:
        cost_ms[0] = step_ms[0]
    if requests == 0:
        return Choice(0, math.inf, float(cost_ms[0]))
    theta = expected / cost_ms
    allowed = theta > (1.0 + min_gain) * theta[0]
    allowed[0] = True
    slowest = None
    if places is not None:
        slowest = _slowest(rows, places, theta.size) / (other_ms + cost_ms)
        keeps = allowed & (slowest >= floor_per_ms)
        allowed = keeps if keeps.any() else allowed & (slowest == slowest[allowed].max())
    admitted = int(np.argmax(np.where(allowed, theta, -np.inf)))
    edge = float(values[admitted - 1]) if admitted else _break_even(requests, table, draft_ms, draft_paid, min_gain)
    served = 0.0 if slowest is None else min(float(slowest[admitted]), floor_per_ms)
    return Choice(admitted, edge, float(cost_ms[admitted]), (served, float(theta[admitted])))


def _order(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All survivals in the order of admission, and a 0 behind each row ``[S * (G + 1)]`` float64; and their places in
    the flat ``[S, G + 1]`` array.

    A sort that brings places along costs several times one of numbers, so the places are sorted inside the numbers:
    the bits of floats >= 0 are ordered as they are, and the lowest of them (13 for 256 x 17 places, of 52 behind the
    point) give way to the place, which also settles ties: lower slot, lower position. Survivals that differ in those
    bits alone can come out in the wrong order, and so can -0, which is not ordered by its bits; then it is done again
    the slow way.
    """
    slots, width = rows.shape
    padded = np.zeros((slots, width + 1))
    padded[:, :width] = rows
    flat = padded.reshape(-1)
    below = (1 << flat.size.bit_length()) - 1
    places = np.sort(np.arange(flat.size) - (flat.view(np.int64) & ~below)) & below
    values = flat.take(places)
    if (values[1:] > values[:-1]).any():
        places = np.argsort(-flat, kind="stable")
        values = flat.take(places)
    return values, places


def _slowest(rows: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """``[size]`` expected tokens of the request that has fewest, after 0, 1, 2, ... admissions at ``places``.

    Each request's tokens only grow, so those before its next admission are its least from now on: the fewest after n
    admissions are the least of all that stand before a later one. (Before the 0 behind a row stand the tokens of the
    whole row, so every request is among the later ones.)
    """
    slots, width = rows.shape
    tokens = np.zeros((slots, width + 1))
    np.cumsum(rows, axis=1, out=tokens[:, 1:])
    tokens += 1.0
    before = tokens.reshape(-1).take(places)
    before[size - 1] = before[size - 1 :].min()
    return np.minimum.accumulate(before[size - 1 :: -1])[::-1]


def _break_even(requests: int, table: StepTimeTable, draft_ms: float, draft_paid: bool, min_gain: float) -> float:
    """Survival s with (R + s) / (draft_ms + ms(R + 1)) = (1 + min_gain) * theta(0)."""
    if requests + 1 > table.last:
        return math.inf
    none_ms = table.ms(requests) + (draft_ms if draft_paid else 0.0)
    return requests * ((1.0 + min_gain) * (draft_ms + table.ms(requests + 1)) / none_ms - 1.0)
