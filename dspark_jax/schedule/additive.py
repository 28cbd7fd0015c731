"""Step times of programs that were not measured: a part for the tokens, and one for the slots and their context.

    ms(kind, T, S, C) = f_kind(T) + w_kind * a(S) * C

f is the price of the matmuls: free at every number of tokens that was measured, non-decreasing, linear between. The
rest is what a batch in S slots pays for C cache cells of each: w says how dear a kind of program reads them (one query
a slot, or a block of them), a how dear they are at that many slots. a need not be in proportion to S: few slots fit
into a processor's caches, and many keep more of its cores busy. Between measured numbers of slots a(S) / S is linear.
Everything is fitted to relative errors, so that short steps count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dspark_jax.schedule.step_time import isotonic

ROUNDS = 20
"""Of the alternating fit of w and a; it has converged to three digits long before."""

Slopes: TypeAlias = dict[tuple[str, int], tuple[float, float]]
"""By kind and slots: milliseconds a cell, and how much they weigh."""


@dataclass(frozen=True)
class Step:
    """A measured step."""

    kind: str
    tokens: int
    slots: int
    context: int
    ms: float


@dataclass(frozen=True)
class AdditiveModel:
    """Milliseconds of a step by its kind, tokens, slots and context.

    Attributes:
        tokens: by kind, numbers of tokens ``[n]`` and their f ``[n]``, both increasing.
        kinds: w by kind; 0 where no two contexts were measured.
        slots: numbers of slots ``[m]`` with two contexts, and their a(S) / S ``[m]``.
    """

    tokens: dict[str, tuple[np.ndarray, np.ndarray]]
    kinds: dict[str, float]
    slots: tuple[np.ndarray, np.ndarray]

    def cell_ms(self, kind: str, slots: int) -> float:
        """Milliseconds of one more cell of every slot: w * a(S)."""
        known, each = self.slots
        return self.kinds.get(kind, 0.0) * slots * float(np.interp(slots, known, each)) if known.size else 0.0

    def ms(self, kind: str, tokens: float, slots: int, context: float) -> float:
        """The formula above; f stays constant beyond the numbers of tokens that were measured.

        Raises:
            ValueError: no step of this kind was measured.
        """
        if kind not in self.tokens:
            raise ValueError(f"kind: one of {', '.join(self.tokens)} expected (those measured), got {kind!r}")
        return float(np.interp(tokens, *self.tokens[kind])) + self.cell_ms(kind, slots) * context

    def error(self, step: Step) -> float:
        """Relative error at a measured step."""
        return abs(self.ms(step.kind, step.tokens, step.slots, step.context) / step.ms - 1.0)


def fit(steps: Sequence[Step]) -> AdditiveModel:
    """The model of what was measured: first what a cell costs, from steps that differ in nothing but the context, then
    f from what is left.

    Raises:
        ValueError: no steps, or milliseconds that are not positive and finite.
    """
    if not steps:
        raise ValueError("steps: at least one measured step expected")
    if bad := [step for step in steps if not (np.isfinite(step.ms) and step.ms > 0)]:
        raise ValueError(f"ms: finite numbers > 0 expected, got {bad[0].ms} for {bad[0]}")
    model = AdditiveModel({}, *_cells(_slopes(steps)))
    for kind in {step.kind: None for step in steps}:
        own = [step for step in steps if step.kind == kind]
        counts, group = np.unique([step.tokens for step in own], return_inverse=True)
        rest = np.array([step.ms - model.cell_ms(kind, step.slots) * step.context for step in own])
        weight = np.array([step.ms for step in own]) ** -2.0
        means = np.bincount(group, weight * rest) / np.bincount(group, weight)
        model.tokens[kind] = counts, isotonic(np.maximum(means, 0.0))
    return model


def _slopes(steps: Sequence[Step]) -> Slopes:
    """Of steps with equal tokens and different contexts."""
    sums: Slopes = {}
    for place in {(step.kind, step.slots, step.tokens): None for step in steps}:
        own = [step for step in steps if (step.kind, step.slots, step.tokens) == place]
        c, ms = (np.array([getattr(step, name) for step in own], np.float64) for name in ("context", "ms"))
        weight = ms**-2.0
        c, ms = c - np.average(c, weights=weight), ms - np.average(ms, weights=weight)
        up, down = sums.get(place[:2], (0.0, 0.0))
        sums[place[:2]] = up + float((weight * c * ms).sum()), down + float((weight * c * c).sum())
    return {key: (max(up / down, 0.0), down) for key, (up, down) in sums.items() if down > 0}


def _cells(
    slopes: dict[tuple[str, int], tuple[float, float]],
) -> tuple[dict[str, float], tuple[np.ndarray, np.ndarray]]:
    """(w by kind, (S, a(S) / S)) with w * a nearest to the slopes; the mean of w is 1."""
    kinds = sorted({kind for kind, _ in slopes})
    slots = np.array(sorted({count for _, count in slopes}))
    found, weight = np.zeros((len(kinds), slots.size)), np.zeros((len(kinds), slots.size))
    for (kind, count), (slope, strength) in slopes.items():
        at = kinds.index(kind), int(np.searchsorted(slots, count))
        found[at], weight[at] = slope, strength
    w = np.ones(len(kinds))
    a = np.zeros(slots.size)
    for _ in range(ROUNDS):
        a = _ratio((weight * found * w[:, None]).sum(axis=0), (weight * w[:, None] ** 2).sum(axis=0))
        w = _ratio((weight * found * a).sum(axis=1), (weight * a**2).sum(axis=1))
        w = w / w.mean() if w.any() else w
    return dict(zip(kinds, w.tolist(), strict=True)), (slots, a / np.maximum(slots, 1))


def _ratio(up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """up / down, 0 where nothing is known."""
    return np.divide(up, down, out=np.zeros_like(up), where=down > 0)
