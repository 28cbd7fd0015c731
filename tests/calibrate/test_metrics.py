"""Calibration error, ranking and squared error against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.calibrate import metrics


def test_ece_of_a_hand_made_case() -> None:
    """Two bins: scores 0.2, 0.4, labels 0, 1: |0.3 - 0.5| = 0.2. Score 0.9, label 1: 0.1. (2*0.2 + 0.1)/3"""
    scores, labels = np.array([0.2, 0.4, 0.9]), np.array([0, 1, 1])
    assert metrics.ece(scores, labels, bins=2) == pytest.approx(0.5 / 3)
    count, mean_score, mean_label = metrics.reliability(scores, labels, bins=4)
    assert count.tolist() == [1, 1, 0, 1]
    assert mean_score == pytest.approx([0.2, 0.4, np.nan, 0.9], nan_ok=True)
    assert mean_label == pytest.approx([0.0, 1.0, np.nan, 1.0], nan_ok=True)


def test_score_one_falls_into_the_last_bin_and_an_edge_into_the_upper() -> None:
    count, _, _ = metrics.reliability([0.0, 0.5, 1.0], [0, 1, 1], bins=2)
    assert count.tolist() == [1, 2]


def test_ece_by_position_is_that_of_each_column() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((50, 3))
    labels = rng.random((50, 3)) < scores
    expected = [metrics.ece(scores[:, k], labels[:, k], bins=7) for k in range(3)]
    assert metrics.ece(scores, labels, bins=7).tolist() == expected
    for k in range(3):
        count, mean_score, mean_label = metrics.reliability(scores[:, k], labels[:, k], bins=7)
        full = count > 0
        by_definition = (count / 50 * np.abs(mean_score - mean_label))[full].sum()
        assert expected[k] == pytest.approx(by_definition, abs=1e-15)


def test_auc_counts_ordered_pairs_and_ties_as_half() -> None:
    """Against the definition: every (accepted, rejected) pair."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 6, (40, 2)).astype(float)  # many ties
    labels = rng.random((40, 2)) < 0.5
    for k in range(2):
        above, below = scores[labels[:, k], k], scores[~labels[:, k], k]
        pairs = (above[:, None] > below[None, :]) + 0.5 * (above[:, None] == below[None, :])
        assert metrics.auc(scores, labels)[k] == pytest.approx(pairs.mean())
    assert metrics.auc([0.1, 0.9], [0, 1]) == 1.0
    assert np.isnan(metrics.auc([0.1, 0.9], [1, 1])), "one class only"


def test_brier_is_the_mean_squared_difference() -> None:
    assert metrics.brier([0.5, 1.0], [1, 0]) == pytest.approx((0.25 + 1.0) / 2)
    assert metrics.brier([[0.5, 0.0]], [[1, 0]]).tolist() == [0.25, 0.0]


def test_survival_scores_multiply_tempered_sigmoids_and_far_logits_do_not_warn() -> None:
    """sigmoid(ln 3) = 3/4; at temperature 2, ln 9 gives the same."""
    ln3 = np.log(3.0)
    assert metrics.survival_scores([[ln3, 0.0]]) == pytest.approx(np.array([[0.75, 0.375]]))
    assert metrics.survival_scores([[2 * ln3, 0.0]], [2.0, 1.0]) == pytest.approx(np.array([[0.75, 0.375]]))
    assert metrics.survival_scores([[1e4, -1e4]]).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("scores", "labels", "match"),
    [
        ([0.5], [1, 0], "one shape"),
        ([], [], "N > 0"),
        ([1.5], [1], "probabilities"),
        ([np.nan], [1], "probabilities"),
        ([0.5], [2], "labels"),
    ],
)
def test_malformed_samples_are_refused(scores: list[float], labels: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        metrics.ece(scores, labels)


def test_malformed_bins_and_scores_that_cannot_be_ranked_are_refused() -> None:
    with pytest.raises(ValueError, match="bins"):
        metrics.ece([0.5], [1], bins=0)
    with pytest.raises(ValueError, match="finite"):
        metrics.auc([np.inf, 0.0], [1, 0])
    assert metrics.auc([5.0, -3.0], [1, 0]) == 1.0, "logits are fine: only their order matters"
