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
    """

    drafts: int
    edge: float
    step_ms: float


def choose(
    survival: ArrayLike,
    table: StepTimeTable,
    draft_ms: float = 0.0,
    *,
    draft_paid: bool = False,
    min_gain: float = 0.0,
    floor_per_ms: float = 0.0,
) -> Choice:
    """``capacity`` under two conditions; without them its ``drafts`` are that function's.

    Args:
        survival, table, draft_ms, draft_paid: as in ``capacity``.
        min_gain: drafts are admitted only where theta exceeds that of none by this share.
        floor_per_ms: expected tokens per millisecond that the slowest request shall have (the paper's tokens/s/user,
            sec. 5.2). Among the numbers of drafts that keep it the best theta is chosen; where none keeps it, the one
            that serves the slowest request best.

    Raises:
        ValueError: as ``capacity``, and for a negative min_gain or floor_per_ms.
    """
    if not (min_gain >= 0.0 and floor_per_ms >= 0.0):
        raise ValueError(f"min_gain and floor_per_ms: numbers >= 0 expected, got {min_gain} and {floor_per_ms}")
    rows = _survival_rows(survival)
    requests = rows.shape[0]
    values = _candidates(rows)
    expected, step_ms = _admission_path(requests, values, table, draft_ms, 0)
    cost_ms = draft_ms + step_ms
    if not draft_paid:
        cost_ms[0] = step_ms[0]
    if requests == 0:
        return Choice(0, math.inf, float(cost_ms[0]))
    theta = expected / cost_ms
    allowed = theta > (1.0 + min_gain) * theta[0]
    allowed[0] = True
    if floor_per_ms > 0.0:
        slowest = _slowest(rows, theta.size) / cost_ms
        keeps = allowed & (slowest >= floor_per_ms)
        allowed = keeps if keeps.any() else allowed & (slowest == slowest[allowed].max())
    admitted = int(np.argmax(np.where(allowed, theta, -np.inf)))
    edge = float(values[admitted - 1]) if admitted else _break_even(requests, table, draft_ms, draft_paid, min_gain)
    return Choice(admitted, edge, float(cost_ms[admitted]))


def _slowest(rows: np.ndarray, size: int) -> np.ndarray:
    """``[size]`` expected tokens of the request that has fewest, after 0, 1, 2, ... admissions.

    Each request's tokens only grow, so those before its next admission are its least from now on: the fewest after n
    admissions are the least of all that stand before a later one, or at the end.
    """
    falling = -rows.reshape(-1)
    order = np.argsort(falling)
    admitted = falling[order[:size]]
    if (admitted[1:] == admitted[:-1]).any():  # ties: lower slot, lower position; a sort that keeps them is slower
        order = np.argsort(falling, kind="stable")
    after = 1.0 + np.cumsum(rows, axis=1, dtype=np.float64)
    before = np.concatenate([np.ones((rows.shape[0], 1)), after[:, :-1]], axis=1).reshape(-1)[order]
    last = min(float(after[:, -1].min()), float(before[size - 1 :].min(initial=np.inf)))
    backwards = np.concatenate([[last], before[: size - 1][::-1]])
    return np.minimum.accumulate(backwards)[::-1]


def _break_even(requests: int, table: StepTimeTable, draft_ms: float, draft_paid: bool, min_gain: float) -> float:
    """Survival s with (R + s) / (draft_ms + ms(R + 1)) = (1 + min_gain) * theta(0)."""
    if requests + 1 > table.last:
        return math.inf
    none_ms = table.ms(requests) + (draft_ms if draft_paid else 0.0)
    return requests * ((1.0 + min_gain) * (draft_ms + table.ms(requests + 1)) / none_ms - 1.0)
