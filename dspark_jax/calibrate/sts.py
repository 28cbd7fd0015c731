"""Sequential temperature scaling (STS) of the confidence head.

Source: Cheng et al., arXiv:2607.05147, the paper's sections on confidence calibration: position by position
from the left, one temperature each, chosen so that the *survival* score (cumulative product of
sigmoid(logit_i / T_i), i <= k) has the lowest calibration error. Grid and ties as in oracle/README section 5.
N blocks, G positions; the fit is float64 NumPy, because one sample that crosses a bin edge moves ECE by about
1 / N and may change the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dspark_jax.calibrate.metrics import ece_of_column, sigmoid
from dspark_jax.calibrate.tables import LARGEST_SHIFT, Calibration, check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

# Python's power and not NumPy's, whose last bit depends on the processor's vector instructions.
GRID = np.array([4.0 ** ((j - 40) / 40) for j in range(81)])
"""[81] candidate temperatures, 1/4 to 4, ascending; GRID[40] is exactly 1."""

SHIFTS = tuple(j / 20 for j in range(-20, 21))
"""Candidate shifts of a table's logits, -1 to 1."""

TIE = 1e-12
"""ECE values this close to the lowest are tied; the temperature nearest to 1 wins, then the smaller one."""

# Grid indices by |ln T|, then by T.
_PREFERENCE = np.array(sorted(range(81), key=lambda j: (abs(j - 40), j)))


def fit(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    bins: int = 20,
    *,
    verification: str = "rejection",
    sampling_temperature: float = 1.0,
    shifts: Sequence[float] = (),
) -> Calibration:
    """Sequential temperature scaling, exactly the paper's unless ``shifts`` are given.

    Args:
        confidence_logits: [N, G] of blocks that were verified in full.
        accepted: [N, G], 1 if drafts 1..k of the block were all accepted, else 0; rows non-increasing.
        bins: equal-width bins of the calibration error.
        verification: rule under which the records were made; kept with the result.
        sampling_temperature: of the records; kept with the result.
        shifts: candidates of a number added to all logits (``SHIFTS``): the search of the first position goes over
            them, too. Of equal errors the one nearest to 0 wins. An extension; empty: none.

    Returns:
        Calibration with temperature, ece_before and ece_after [G] float64.

    Raises:
        ValueError: shapes differ or hold nothing, logits not finite, labels other than 0 and 1 or rising
            along a row, bins < 1, an unknown rule, a sampling temperature that is negative or not finite, a shift
            beyond ``LARGEST_SHIFT``.
    """
    logits, labels = _records(confidence_logits, accepted)
    if bins < 1:
        raise ValueError(f"bins: at least 1 expected, got {bins}")
    check_key(verification, sampling_temperature)
    if len(shifts) and not np.abs(np.asarray(shifts, np.float64)).max() <= LARGEST_SHIFT:
        raise ValueError(f"shifts: numbers within {LARGEST_SHIFT:g} of 0 expected, got {list(shifts)}")
    shift = _best_shift(logits[:, 0], labels[:, 0], bins, shifts) if len(shifts) else None
    moved = logits + (shift or 0.0)
    positions = logits.shape[1]
    temperature, before, after = np.empty(positions), np.empty(positions), np.empty(positions)
    raw = fitted = np.ones(logits.shape[0])  # survival up to the position before, without and with temperatures
    for k in range(positions):
        raw = raw * sigmoid(logits[:, k])
        before[k] = ece_of_column(raw, labels[:, k], bins)
        errors = grid_errors(fitted, moved[:, k], labels[:, k], bins)
        best = _PREFERENCE[errors[_PREFERENCE] <= errors.min() + TIE][0]
        temperature[k], after[k] = GRID[best], errors[best]
        fitted = fitted * sigmoid(moved[:, k] / GRID[best])
    return Calibration(
        temperature=temperature,
        ece_before=before,
        ece_after=after,
        verification=verification,
        sampling_temperature=float(sampling_temperature),
        shift=shift,
    )


def _best_shift(logits: np.ndarray, labels: np.ndarray, bins: int, shifts: Sequence[float]) -> float:
    """The candidate with which some temperature gives the first position the lowest error."""
    nobody = np.ones(len(logits))  # survival before the first position
    errors = {float(s): grid_errors(nobody, logits + s, labels, bins).min() for s in shifts}
    least = min(errors.values())
    return min((s for s, error in errors.items() if error <= least + TIE), key=lambda s: (abs(s), s))


def grid_errors(survival_before: np.ndarray, logits: np.ndarray, labels: np.ndarray, bins: int) -> np.ndarray:
    """[81] ECE at one position for every temperature of `GRID`, earlier temperatures fixed.

    Args:
        survival_before: [N] float64 calibrated survival of the position before (ones at the first).
        logits: [N] float64 confidence logits of this position.
        labels: [N] float64, 0 or 1.
        bins: equal-width bins.
    """
    return np.array([ece_of_column(survival_before * sigmoid(logits / t), labels, bins) for t in GRID])


def _records(confidence_logits: ArrayLike, accepted: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(confidence_logits, np.float64)
    labels = np.asarray(accepted, np.float64)
    if logits.ndim != 2 or logits.shape != labels.shape or 0 in logits.shape:
        raise ValueError(
            "confidence_logits and accepted: one shape [N, G] with N, G > 0 expected, "
            f"got {list(logits.shape)} and {list(labels.shape)}"
        )
    if not np.isfinite(logits).all():
        raise ValueError("confidence_logits: finite numbers expected")
    if not ((labels == 0.0) | (labels == 1.0)).all():
        raise ValueError("accepted: 0 or 1 expected")
    rising = np.argwhere(labels[:, 1:] > labels[:, :-1])
    if rising.size:
        raise ValueError(
            f"accepted[{rising[0][0]}]: position {rising[0][1] + 1} is accepted after one that was not; "
            "accepted[n, k] says whether drafts 1..k were all accepted"
        )
    return logits, labels
