"""Step times of programs that were not measured: a part for the tokens and a part for the cache cells read.

    ms(T, cells) = f(T) + b * cells

f is the price of the matmuls (free at every number of tokens that was measured, non-decreasing, linear between), b
that of reading one cache cell of one slot. Fitted to relative errors, so that short steps count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_jax.schedule.step_time import isotonic


@dataclass(frozen=True)
class AdditiveModel:
    """Milliseconds of a step by its tokens and by the cache cells it reads (slots x context)."""

    tokens: np.ndarray  # [n] strictly increasing
    tokens_ms: np.ndarray  # [n] float64, non-decreasing: f
    cell_ms: float  # b >= 0

    def ms(self, tokens: float, cells: float) -> float:
        """f(tokens) + b * cells; f stays constant beyond the numbers of tokens that were measured."""
        return float(np.interp(tokens, self.tokens, self.tokens_ms) + self.cell_ms * cells)

    def worst_error(self, tokens: Sequence[int], cells: Sequence[int], milliseconds: Sequence[float]) -> float:
        """Largest relative error over measured steps; 0 where there are none."""
        found = [abs(self.ms(t, c) / ms - 1.0) for t, c, ms in zip(tokens, cells, milliseconds, strict=True)]
        return max(found, default=0.0)


def fit(tokens: Sequence[int], cells: Sequence[int], milliseconds: Sequence[float]) -> AdditiveModel:
    """The model with the least sum of squared relative errors.

    b comes from steps of equal tokens and different cells. Where no such pair was measured it is 0.

    Args:
        tokens, cells, milliseconds: one entry each for every measured step, milliseconds > 0.

    Raises:
        ValueError: no steps, lists of different lengths, or milliseconds that are not positive and finite.
    """
    t, c, ms = np.asarray(tokens), np.asarray(cells, np.float64), np.asarray(milliseconds, np.float64)
    if not (t.ndim == 1 and t.size and t.shape == c.shape == ms.shape):
        raise ValueError(f"tokens, cells, milliseconds: equally long lists expected, got {t.size}, {c.size}, {ms.size}")
    if not (np.isfinite(ms) & (ms > 0)).all():
        raise ValueError(f"milliseconds: finite entries > 0 expected, got {ms.tolist()!r:.80}")
    counts, group = np.unique(t, return_inverse=True)
    weight = 1.0 / ms**2

    def means(values: np.ndarray) -> np.ndarray:
        """[n] weighted means over the steps of equal tokens."""
        return np.bincount(group, weight * values) / np.bincount(group, weight)

    # f is free at every number of tokens, so it takes the mean and b what varies around it.
    around, above = c - means(c)[group], ms - means(ms)[group]
    spread = float((weight * around**2).sum())
    slope = max(float((weight * around * above).sum()) / spread, 0.0) if spread > 0 else 0.0
    return AdditiveModel(counts, isotonic(np.maximum(means(ms - slope * c), 0.0)), slope)
