"""How good a probability is: calibration error, ranking and squared error, position by position.

Conventions of ECE as in the paper's sec. 5 (Cheng et al., arXiv:2607.05147) and oracle/README section 5:
equal-width bins, every sample counts at every position. All in float64 NumPy; N samples, G positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64; exact 0 and 1 for far logits, without warnings."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)))


def survival_scores(
    confidence_logits: ArrayLike, temperature: ArrayLike | None = None, shift: float | None = None
) -> np.ndarray:
    """[N, G] float64: cumulative product along a row of sigmoid((logit_k + shift) / T_k), the scores STS calibrates.

    Args:
        confidence_logits: [N, G].
        temperature: [G]; None = 1 everywhere.
    """
    logits = np.asarray(confidence_logits, np.float64) + (shift or 0.0)
    if temperature is not None:
        logits = logits / np.asarray(temperature, np.float64)[None, :]
    return np.cumprod(sigmoid(logits), axis=1)


def reliability(scores: ArrayLike, labels: ArrayLike, bins: int = 20) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The reliability diagram: samples, mean score and mean label of each bin.

    Args:
        scores: [N] probabilities.
        labels: [N] 0 or 1.
        bins: equal widths; a score p falls into bin min(floor(p * bins), bins - 1).

    Returns:
        (count, mean score, mean label), each [bins] float64; the means of an empty bin are NaN.
    """
    p, y = _pairs(scores, labels, bins, ndim=1)
    index = _bin_index(p, bins)
    count = np.bincount(index, minlength=bins).astype(np.float64)
    sums = (np.bincount(index, weights=values, minlength=bins) for values in (p, y))
    mean_score, mean_label = (np.divide(s, count, out=np.full(bins, np.nan), where=count > 0) for s in sums)
    return count, mean_score, mean_label


def ece(scores: ArrayLike, labels: ArrayLike, bins: int = 20) -> np.ndarray:
    """Expected calibration error: sum over bins of count / N * |mean score - mean label|.

    Args:
        scores: [N] or [N, G] probabilities.
        labels: same shape, 0 or 1.
        bins: as in `reliability`.

    Returns:
        [] or [G] float64.

    Raises:
        ValueError: shapes differ, no samples, a score outside [0, 1], a label other than 0 and 1, bins < 1.
    """
    p, y = _pairs(scores, labels, bins)
    if p.ndim == 1:
        return np.asarray(ece_of_column(p, y, bins))
    return np.array([ece_of_column(p[:, k], y[:, k], bins) for k in range(p.shape[1])])


def ece_of_column(scores: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """`ece` of [N] float64 scores and labels, unchecked: the inner loop of the fit."""
    # count / N * |mean p - mean y| of a bin is |sum of (p - y)| / N; empty bins add nothing.
    gaps = np.bincount(_bin_index(scores, bins), weights=scores - labels, minlength=bins)
    return float(np.abs(gaps).sum() / scores.size)


def brier(scores: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Mean squared difference between score and label, [] or [G]. Arguments and errors as `ece`."""
    p, y = _pairs(scores, labels)
    return np.mean((p - y) ** 2, axis=0)


def auc(scores: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Area under the ROC curve: the chance that an accepted sample outscores a rejected one, ties half.

    Args:
        scores: [N] or [N, G]; any finite numbers, logits included: only their order matters.
        labels: same shape, 0 or 1.

    Returns:
        [] or [G] float64; NaN where a column holds only one class.

    Raises:
        ValueError: shapes differ, no samples, a score not finite, a label other than 0 and 1.
    """
    s, y = _pairs(scores, labels, probabilities=False)
    if s.ndim == 1:
        return np.asarray(_auc_of_column(s, y))
    return np.array([_auc_of_column(s[:, k], y[:, k]) for k in range(s.shape[1])])


def _auc_of_column(scores: np.ndarray, labels: np.ndarray) -> float:
    positives = labels.sum()
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    # Mann-Whitney: rank sum of the positives, equal scores sharing their mean rank.
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float((mean_rank[inverse] * labels).sum())
    return float((rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives))


def _bin_index(scores: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum((scores * bins).astype(np.intp), bins - 1)


def _pairs(
    scores: ArrayLike,
    labels: ArrayLike,
    bins: int = 1,
    *,
    ndim: int | None = None,
    probabilities: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    if s.shape != y.shape or s.ndim not in ((1, 2) if ndim is None else (ndim,)) or s.shape[0] == 0:
        raise ValueError(
            f"scores and labels: one shape [N] or [N, G] expected, N > 0, got {list(s.shape)} and {list(y.shape)}"
        )
    if bins < 1:
        raise ValueError(f"bins: at least 1 expected, got {bins}")
    if not np.isfinite(s).all() or (probabilities and not ((s >= 0.0) & (s <= 1.0)).all()):
        raise ValueError(f"scores: {'probabilities in [0, 1]' if probabilities else 'finite numbers'} expected")
    if not ((y == 0.0) | (y == 1.0)).all():
        raise ValueError("labels: 0 or 1 expected")
    return s, y
