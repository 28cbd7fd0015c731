"""Measures of calibration by position: against values by hand, and at their ceiling where confidence is the truth."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.calibrate.assess import assess, diagram


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


def test_a_head_that_knows_the_overlap_reaches_the_ceiling_and_is_calibrated() -> None:
    """Confidence = 1 - TV, acceptances drawn with it: AUC and its ceiling are one number. ECE of 10 bins over 40,000
    blocks: below 0.02 (the expected noise is about 0.004). Twice the logit is over-confident: T = 2 repairs it."""
    rng = np.random.default_rng(0)
    overlap = rng.uniform(0.2, 0.95, size=(40_000, 3))
    labels = np.cumprod(rng.random(overlap.shape) < overlap, axis=1)
    found = assess(2 * logit(overlap), labels, np.full(3, 2.0), overlap)
    np.testing.assert_allclose(found["auc_after"], found["auc_ceiling"], atol=1e-12)
    np.testing.assert_allclose(found["conditional_auc"], found["conditional_auc_ceiling"], atol=1e-12)
    assert (found["ece_after"] < 0.02).all() and (found["ece_before"] > 0.05).all()
    assert (found["brier_after"] < found["brier_before"]).all()
    np.testing.assert_allclose(found["survival"], labels.mean(0))
    np.testing.assert_allclose(found["auc_of_ceiling"], np.ones(3), atol=1e-12)
    assert found["least_auc_of_ceiling"] == pytest.approx(1.0, abs=1e-12)


def test_the_conditional_ranking_looks_at_blocks_that_got_there() -> None:
    """Position 2: blocks 1, 2, 3 were accepted at 1; scores 3, 1, 2 with labels 1, 0, 0 rank perfectly. Block 0, which
    was not, would spoil it. Over all blocks, survival 2 of block 0 is a rejection like any other."""
    logits = np.array([[-1.0, 9.0], [1.0, 3.0], [1.0, 1.0], [1.0, 2.0]])
    labels = np.array([[0, 0], [1, 1], [1, 0], [1, 0]])
    found = assess(logits, labels, np.ones(2), np.full((4, 2), 0.5))
    np.testing.assert_allclose(found["conditional_auc"], [1.0, 1.0])
    np.testing.assert_allclose(found["conditional_auc_ceiling"], [0.5, 0.5])
    # Of 4 blocks 3 were accepted at 1; of those 1 at 2. Both positions rank perfectly where equal overlaps say nothing.
    assert found["accepted"].tolist() == [3, 1] and found["rejected"].tolist() == [1, 2]
    np.testing.assert_allclose(found["auc_of_ceiling"], [2.0, 2.0])
    one_class = assess(logits, np.ones((4, 2)), np.ones(2), np.full((4, 2), 0.5))
    assert np.isnan(one_class["auc_before"]).all() and np.isnan(one_class["conditional_auc"]).all()
    assert np.isnan(one_class["least_auc_of_ceiling"])


def test_the_diagram_has_a_panel_a_position() -> None:
    shown = diagram(np.zeros((4, 2)), np.array([[1, 0]] * 4), np.array([1.0, 1.0]))
    count, score, label = shown["before"][1]
    assert count[2] == 4 and score[2] == pytest.approx(0.25) and label[2] == 0.0
    assert len(shown["after"]) == 2
