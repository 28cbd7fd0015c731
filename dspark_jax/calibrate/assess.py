"""How well calibrated confidences do on records, position by position, and the best that could be done.

N blocks, G positions. Everything is about prefix survival: the score of position k is the product of the conditional
probabilities up to k, the label whether drafts 1..k were all accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.calibrate.metrics import auc, brier, ece, reliability, survival_scores
from dspark_jax.calibrate.sts import GRID, SHIFTS
from dspark_jax.calibrate.tables import Calibration

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

LEAST_OUTCOMES = 50
"""Accepted and rejected blocks that a position's temperature should rest on: with fewer, chance decides it."""


def assess(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    temperature: ArrayLike,
    overlap: ArrayLike,
    bins: int = 10,
    *,
    shift: float | None = None,
) -> dict[str, Any]:
    """Measures ``[G]`` before and after the calibration.

    Args:
        confidence_logits: [N, G]. accepted: [N, G], 1 if drafts 1..k were all accepted.
        temperature: [G].
        shift: added to all logits before the temperatures.
        overlap: [N, G], 1 - TV of the distributions each draft was drawn from and compared with.

    Returns:
        ``ece_before/after``, ``brier_before/after``, ``auc_before/after`` of survival; ``auc_ceiling``: of the
        cumulative product of the overlaps, which is the chance of acceptance itself under ``rejection``; and the
        same of single positions (``conditional_auc``, ``conditional_auc_ceiling``): blocks whose drafts 1..k-1 were
        accepted, scored by position k alone. ``survival``: the mean label. NaN where a position saw one outcome only.
        ``auc_of_ceiling``: ``auc_after`` as a share of ``auc_ceiling``, and ``least_auc_of_ceiling`` its minimum. At
        sampling temperature 0 an overlap is the outcome itself, 0 or 1: the ceiling is 1 by construction.
        ``accepted`` and ``rejected``: blocks whose draft k was, among those whose earlier drafts were accepted.
    """
    logits, labels = np.asarray(confidence_logits, np.float64), np.asarray(accepted, np.float64)
    agreement = np.clip(np.asarray(overlap, np.float64), 0.0, 1.0)
    ceiling = np.cumprod(agreement, axis=1)
    found: dict[str, Any] = {"blocks": len(labels), "survival": labels.mean(0)}
    for name, scores in _scores(logits, temperature, shift).items():
        found[f"ece_{name}"] = ece(scores, labels, bins)
        found[f"brier_{name}"] = brier(scores, labels)
        found[f"auc_{name}"] = auc(scores, labels)
    found["auc_ceiling"] = auc(ceiling, labels)
    ceiling_auc = found["auc_ceiling"]
    nowhere = np.full_like(ceiling_auc, np.nan)
    found["auc_of_ceiling"] = np.divide(found["auc_after"], ceiling_auc, out=nowhere, where=ceiling_auc > 0)
    known = found["auc_of_ceiling"][~np.isnan(found["auc_of_ceiling"])]
    found["least_auc_of_ceiling"] = float(known.min()) if known.size else float("nan")
    found["accepted"], found["rejected"] = outcomes(labels)
    found["conditional_auc"] = _conditional_auc(logits, labels)
    found["conditional_auc_ceiling"] = _conditional_auc(agreement, labels)
    return found


def outcomes(accepted: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Blocks whose draft k was accepted and rejected, ``[G]`` int64 each, among those that got to position k."""
    labels = np.asarray(accepted, np.float64)
    kept = labels.sum(0).astype(np.int64)
    return kept, np.concatenate([[len(labels)], kept[:-1]]) - kept


def doubts(calibration: Calibration, labels: np.ndarray) -> list[str]:
    """A line for every temperature, and a shift, that its records do not really decide.

    Args:
        labels: ``[N, G]`` of the blocks of the fit.
    """
    found = []
    temperatures = np.asarray(calibration.temperature)
    if calibration.shift is not None and float(calibration.shift) in (SHIFTS[0], SHIFTS[-1]):
        found.append(
            f"its shift {float(calibration.shift):g} is an end of the candidates: the confidences may be further off"
        )
    for k, (t, accepted, rejected) in enumerate(zip(temperatures, *outcomes(labels), strict=True), 1):
        if min(accepted, rejected) < LEAST_OUTCOMES:
            found.append(
                f"position {k}: its temperature {t:.3g} rests on {accepted} accepted and {rejected} rejected blocks; "
                f"{LEAST_OUTCOMES} of each are advised, so decode more prompts (blocks)"
            )
        if t in (GRID[0], GRID[-1]):
            found.append(
                f"position {k}: its temperature {t:.3g} is an end of the grid: the confidences mean little here"
            )
    return found


def _conditional_auc(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    values = []
    for k in range(labels.shape[1]):
        reached = np.ones(len(labels), bool) if k == 0 else labels[:, k - 1] == 1
        values.append(float(auc(scores[reached, k], labels[reached, k])) if reached.any() else float("nan"))
    return np.array(values)


def diagram(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    temperature: ArrayLike,
    bins: int = 10,
    *,
    shift: float | None = None,
) -> dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """The reliability diagram (the paper's Figure 6) of every position, before and after: lists of G
    ``metrics.reliability`` results."""
    logits, labels = np.asarray(confidence_logits, np.float64), np.asarray(accepted, np.float64)
    return {
        name: [reliability(scores[:, k], labels[:, k], bins) for k in range(labels.shape[1])]
        for name, scores in _scores(logits, temperature, shift).items()
    }


def _scores(logits: np.ndarray, temperature: ArrayLike, shift: float | None) -> dict[str, np.ndarray]:
    return {"before": survival_scores(logits), "after": survival_scores(logits, temperature, shift)}
