"""The loss against the reference's numbers, and against values worked out by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.train.loss import dspark_loss, quotient, slot_loss, slot_terms
from tests.train.oracle_case import CASES, load_case


@pytest.mark.parametrize("name", CASES)
def test_terms_equal_the_reference(name: str) -> None:
    """Given the reference's logits, every numerator and denominator is the reference's."""
    train = load_case(name).train
    confidence = train.get("confidence_pred")
    loss = dspark_loss(
        jnp.asarray(train["draft_logits"]),
        jnp.asarray(train["aligned_target_logits"]),
        jnp.asarray(train["target_ids"]),
        None if confidence is None else jnp.asarray(confidence),
        jnp.asarray(train["eval_mask"]),
        weights=tuple(float(a) for a in train["alphas"]),  # type: ignore[arg-type]
        decay=float(train["loss_decay_gamma"]),
    )
    for term in ("ce", "l1", "confidence"):
        if f"{term}_num" in train:
            num, den = getattr(loss, term)
            np.testing.assert_allclose(num, train[f"{term}_num"], rtol=1e-5)
            np.testing.assert_allclose(den, train[f"{term}_den"], rtol=1e-6)
            np.testing.assert_allclose(quotient((num, den)), train[f"{term}_loss"], rtol=1e-5)
    np.testing.assert_allclose(loss.total, train["total_loss"], rtol=1e-5)


def test_two_words_by_hand() -> None:
    """Draft (1/2, 1/2), target (3/4, 1/4): cross entropy ln 2, L1 1/2, acceptance 3/4; the head says 1/2.

    With decay 1 the second position weighs 1/e; it is masked out, so all denominators are 1.
    """
    draft = jnp.zeros((1, 2, 2))
    target = jnp.log(jnp.array([[[0.75, 0.25], [0.5, 0.5]]]))
    loss = dspark_loss(draft, target, jnp.array([[0, 1]]), jnp.zeros((1, 2)), jnp.array([[True, False]]), decay=1.0)
    np.testing.assert_allclose(loss.ce, (math.log(2), 1.0), rtol=1e-6)
    np.testing.assert_allclose(loss.l1, (0.5, 1.0), rtol=1e-6)
    np.testing.assert_allclose(loss.confidence, (math.log(2), 1.0), rtol=1e-6)
    expected = 0.1 * math.log(2) + 0.9 * 0.5 + math.log(2)
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)


def test_position_weights_decay_from_one() -> None:
    loss = dspark_loss(jnp.zeros((3, 2)), jnp.zeros((3, 2)), jnp.zeros(3, jnp.int32), None, jnp.ones(3), decay=4.0)
    np.testing.assert_allclose(loss.l1[1], 1 + math.exp(-0.25) + math.exp(-0.5), rtol=1e-6)
    assert [float(x) for x in loss.confidence] == [0.0, 0.0]


def test_a_trimmed_vocabulary_counts_the_mass_outside() -> None:
    """A target over four words against a drafter of two equals the whole loss with the others at -inf."""
    target = jax.nn.softmax(jnp.array([[1.0, 0.5, 0.2, -1.0], [0.0, 2.0, 1.0, 0.3]]))
    draft = jnp.array([[0.3, -0.2], [1.0, 0.1]])
    weights = jnp.array([1.0, 0.5])
    small = slot_loss(
        draft,
        target[:, :2],
        target[:, 2:].sum(-1),
        jnp.array([1, 0]),
        jnp.array([True, False]),
        jnp.array([0.2, -0.4]),
        weights,
    )
    full = slot_loss(
        jnp.pad(draft, ((0, 0), (0, 2)), constant_values=-1e30),
        target,
        None,
        jnp.array([1, 0]),
        None,
        jnp.array([0.2, -0.4]),
        weights,
    )
    np.testing.assert_allclose(small.l1, full.l1, rtol=1e-6)
    np.testing.assert_allclose(small.confidence, full.confidence, rtol=1e-6)
    # The label of the second slot is outside: it leaves the cross entropy, numerator and denominator.
    np.testing.assert_allclose(small.ce, (-jax.nn.log_softmax(draft[0])[1], 1.0), rtol=1e-6)


def test_a_soft_cross_entropy_is_against_the_target_and_leaves_out_what_cannot_be_drafted() -> None:
    """Target (1/2, 1/4 | 1/4 outside) against a draft of (3/4, 1/4): (1/2) ln 4/3 + (1/4) ln 4, whatever the label. The
    L1 distance, 1/4 + 0 + 1/4, and the denominator are those of the hard one."""
    draft, target = jnp.log(jnp.array([[3.0, 1.0]])), jnp.array([[0.5, 0.25]])
    arguments = (draft, target, jnp.array([0.25]), jnp.array([1]), jnp.array([False]), None, jnp.array([0.5]))
    soft, hard = slot_terms(*arguments, soft=True), slot_terms(*arguments)
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(4)
    np.testing.assert_allclose(soft.ce, (0.5 * expected, 0.5), rtol=1e-6)
    np.testing.assert_allclose(soft.l1, (0.25, 0.5), rtol=1e-6)
    np.testing.assert_array_equal(soft.l1, hard.l1)
    assert float(hard.ce[1]) == 0.0


def test_no_gradient_reaches_the_target_or_flows_through_the_acceptance_rate() -> None:
    key = jax.random.key(0)
    draft, target = jax.random.normal(key, (2, 2, 3, 5))
    labels, mask = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)

    def total(draft: jax.Array, target: jax.Array, confidence: jax.Array) -> jax.Array:
        return dspark_loss(draft, target, labels, confidence, mask, weights=(0.0, 0.0, 1.0)).total

    to_draft, to_target, to_confidence = jax.grad(total, (0, 1, 2))(draft, target, jnp.ones((2, 3)))
    assert not to_draft.any() and not to_target.any() and to_confidence.all()


def test_slots_of_weight_zero_may_hold_anything() -> None:
    """A dropped block's states are garbage; not even NaN there may reach the sums."""
    draft = jnp.array([[0.0, 0.0], [jnp.nan, 0.0]])
    loss = dspark_loss(draft, jnp.zeros((2, 2)), jnp.zeros(2, jnp.int32), None, jnp.array([1, 0]))
    np.testing.assert_allclose(loss.ce, (math.log(2), 1.0), rtol=1e-6)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="target_logits"):
        dspark_jax.dspark_loss(jnp.zeros((3, 2)), jnp.zeros((3, 4)), jnp.zeros(3), None, jnp.ones(3))
    with pytest.raises(ValueError, match="mask"):
        dspark_loss(jnp.zeros((3, 2)), jnp.zeros((3, 2)), jnp.zeros(3), None, jnp.ones(2))
