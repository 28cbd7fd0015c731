"""Accepted length and acceptance by position from decoding records, with bootstrap intervals over prompts.

Letters: P prompts, G drafts a block, R resamples. All in NumPy float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.evaluate.decode import Trace

INTERVAL = (2.5, 97.5)
"""Percentiles of an interval."""
LEAST_TRIES = 50
"""Blocks that must have reached a position, all prompts together, for it to count in a mean over positions."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums of one prompt's cycles.

    ``kept``, ``cycles``: numerator and denominator of the accepted length (tau, DESIGN section 9): the last cycle of
    a text that reached the limit is left out, since the limit cut it. ``tried [G]``, ``passed [G]``: blocks whose
    drafts 1..k-1 were all accepted and that offered draft k, and those of them that had it accepted. There the last
    cycle is always left out: after a stop token its record does not say which of its tokens was the target's own.
    ``histogram [G + 1]``: blocks by accepted drafts.
    """

    kept: float
    cycles: float
    tried: np.ndarray
    passed: np.ndarray
    histogram: np.ndarray

    @classmethod
    def of(cls, trace: Trace, drafts: int) -> Counts:
        """Raises ValueError for a record that contradicts itself."""
        committed, offered = np.asarray(trace.committed, int), np.asarray(trace.offered, int)
        if len(committed) != len(offered) or (committed < 1).any() or 1 + committed.sum() != len(trace.tokens):
            raise ValueError(f"{trace.suite} {trace.index}: committed and offered do not fit the tokens")
        counted = committed[:-1] if trace.finish == "length" else committed
        accepted, offered = committed[:-1] - 1, offered[:-1]
        if (accepted > offered).any() or (offered > drafts).any():
            raise ValueError(f"{trace.suite} {trace.index}: more accepted than offered, or more than {drafts} drafts")
        k = np.arange(1, drafts + 1)
        tried = (accepted[:, None] >= k - 1) & (offered[:, None] >= k)
        passed = accepted[:, None] >= k
        histogram = np.bincount(accepted, minlength=drafts + 1).astype(float)
        return cls(
            float(counted.sum()),
            float(len(counted)),
            tried.sum(0).astype(float),
            passed.sum(0).astype(float),
            histogram,
        )


class Sample:
    """The counts of a job's prompts as arrays; statistics of any reweighting of the prompts.

    Args:
        traces: one a prompt; jobs that are to be compared have the same prompts in the same order.
        groups: of each set, for the macro mean.
    """

    def __init__(self, traces: Sequence[Trace], drafts: int, groups: Mapping[str, str]) -> None:
        counts = [Counts.of(trace, drafts) for trace in traces]
        self.drafts = drafts
        self.suites = np.array([trace.suite for trace in traces])
        self.groups = np.array([groups.get(trace.suite) or trace.suite for trace in traces])
        self.kept = np.array([c.kept for c in counts])
        self.cycles = np.array([c.cycles for c in counts])
        self.tried = np.array([c.tried for c in counts]).reshape(len(counts), drafts)
        self.passed = np.array([c.passed for c in counts]).reshape(len(counts), drafts)
        self.histogram = np.sum([c.histogram for c in counts], axis=0)
        self.offered = np.array([float(sum(trace.offered[:-1])) for trace in traces])
        self.blocks = np.array([float(len(trace.offered[:-1])) for trace in traces])

    def statistics(self, weights: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Values under prompt weights ``[R, P]`` (None: each prompt once), each ``[R]`` or ``[R, G]``; NaN where there
        is nothing to divide by.

        ``tau/<set>``, ``tau/macro`` (mean over groups), ``tau/all``; ``conditional``: acceptance of draft k given that
        those before it were accepted; ``later_pooled``: of the drafts k >= 2 that were reached, all counted together,
        the share that was accepted; ``later_mean``: the plain mean of ``conditional`` over ``reached()``; ``rate``:
        accepted of the offered drafts; ``offered``: drafts a cycle.
        """
        w = np.ones((1, len(self.kept))) if weights is None else weights
        found = {f"tau/{name}": self._tau(w, self.suites == name) for name in dict.fromkeys(self.suites)}
        groups = np.stack([self._tau(w, self.groups == name) for name in dict.fromkeys(self.groups)])
        found["tau/macro"] = groups.mean(0)
        found["tau/all"] = self._tau(w, np.ones(len(self.kept), bool))
        found["conditional"] = quotient(w @ self.passed, w @ self.tried)
        found["later_pooled"] = self.pooled(weights, self.drafts)
        found["later_mean"] = self.mean(weights, self.reached())
        found["rate"] = quotient(w @ self.passed.sum(1), w @ self.offered)
        found["offered"] = quotient(w @ self.offered, w @ self.blocks)
        return found

    def reached(self) -> list[int]:
        """The positions k >= 2 with at least ``LEAST_TRIES`` tries. They depend on no weights: were they chosen anew in
        every resample, its mean would be one over other positions, and three tries could weigh as much as a thousand.
        """
        return [k for k in range(2, self.drafts + 1) if self.tried[:, k - 1].sum() >= LEAST_TRIES]

    def pooled(self, weights: np.ndarray | None, last: int) -> np.ndarray:
        """``[R]``: accepted drafts at positions 2 to ``last``, of those that were reached there."""
        w = np.ones((1, len(self.kept))) if weights is None else weights
        return quotient(w @ self.passed[:, 1:last].sum(1), w @ self.tried[:, 1:last].sum(1))

    def mean(self, weights: np.ndarray | None, positions: Sequence[int]) -> np.ndarray:
        """``[R]``: plain mean of the conditional acceptance at ``positions`` (from 1); NaN where there are none."""
        w = np.ones((1, len(self.kept))) if weights is None else weights
        at = np.asarray(positions, int) - 1
        if not at.size:
            return np.full(len(w), np.nan)
        return quotient(w @ self.passed[:, at], w @ self.tried[:, at]).mean(1)

    def _tau(self, w: np.ndarray, who: np.ndarray) -> np.ndarray:
        return quotient(w[:, who] @ self.kept[who], w[:, who] @ self.cycles[who])


def quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """``above / below``, NaN where ``below`` is not positive."""
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)


def ratios(mine: Sample, first: Sample, weights: np.ndarray) -> dict[str, dict[str, Any]]:
    """What one drafter is to another, with intervals of the same resampled prompts for both.

    ``tau_ratio``: of the macro means. ``later_pooled_ratio``: of the pooled acceptance behind position 1, over the
    positions that both blocks have. ``later_mean_ratio``: of the plain means over the positions that both reached with
    at least ``LEAST_TRIES`` tries; it gives every position the same weight, and has the wider interval. The last two
    name their ``positions``, and are left out where there are none.

    Args:
        mine, first: of the same prompts in the same order. weights: ``[R, P]`` of ``bootstrap_weights``.
    """
    last = min(mine.drafts, first.drafts)
    reached = [k for k in mine.reached() if k in first.reached()]

    def ratio(statistic: Callable[[Sample, np.ndarray | None], np.ndarray]) -> dict[str, Any]:
        point, spread = (quotient(statistic(mine, w), statistic(first, w)) for w in (None, weights))
        low, high = interval(spread)
        return value(float(point[0]), float(low), float(high))

    found = {"tau_ratio": ratio(lambda sample, w: sample.statistics(w)["tau/macro"])}
    if last >= 2:
        pooled = ratio(lambda sample, w: sample.pooled(w, last))
        found["later_pooled_ratio"] = {**pooled, "positions": list(range(2, last + 1))}
    if reached:
        found["later_mean_ratio"] = {**ratio(lambda sample, w: sample.mean(w, reached)), "positions": reached}
    return found


def bootstrap_weights(suites: np.ndarray, resamples: int, seed: int = 0) -> np.ndarray:
    """``[R, P]`` how often each prompt is drawn, with replacement within its set. Equal arguments give equal draws, so
    that drafters are compared prompt by prompt."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((resamples, len(suites)))
    for name in dict.fromkeys(suites):
        where = np.flatnonzero(suites == name)
        weights[:, where] = rng.multinomial(len(where), np.full(len(where), 1 / len(where)), size=resamples)
    return weights


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2.5 and 97.5 percentiles over the first axis ``[R, ...]``, of the resamples that have a value; NaN where fewer
    than nine of ten have one."""
    if values.size == 0:  # no drafts: nanpercentile would give one empty row, not two
        return np.zeros(values.shape[1:]), np.zeros(values.shape[1:])
    enough = np.isfinite(values).mean(0) >= 0.9
    low, high = np.nanpercentile(np.where(enough, values, 0.0), INTERVAL, axis=0)
    return np.where(enough, low, np.nan), np.where(enough, high, np.nan)


def value(point: float, low: float, high: float) -> dict[str, float | None]:
    """A number with its interval; None for what has no value, since JSON has no NaN."""
    parts = {"value": point, "low": low, "high": high}
    return {name: None if math.isnan(x) else round(float(x), 4) for name, x in parts.items()}
