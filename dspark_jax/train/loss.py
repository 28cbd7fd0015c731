"""The training loss of DSpark (paper equations 8 to 12).

Every term is a (numerator, denominator) pair of weighted sums, so that batches, devices and processes add up before
the division. The weight of position k in its block is ``exp(-k / decay)``: the release has decay 4.0 where the
paper writes gamma.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.types import Array, accumulate_dtype

EPSILON = 1e-6
"""Added to denominators, as in the reference."""

Pair = tuple[Array, Array]


class Loss(flax.struct.PyTreeNode):
    """``total`` is the weighted sum of the three quotients; each term is (numerator, denominator), scalars."""

    total: Array
    ce: Pair
    l1: Pair
    confidence: Pair


def quotient(pair: Pair) -> Array:
    """A term's value."""
    return pair[0] / (pair[1] + EPSILON)


def combine(ce: Pair, l1: Pair, confidence: Pair, weights: tuple[float, float, float]) -> Loss:
    """Equation 12: the total of three terms."""
    total = sum(w * quotient(pair) for w, pair in zip(weights, (ce, l1, confidence), strict=True))
    return Loss(jnp.asarray(total), ce, l1, confidence)


def position_weights(offset: Array, decay: float, dtype: jnp.dtype) -> Array:
    """``exp(-k / decay)`` of the places ``k`` of slots in their blocks (equation 8)."""
    return jnp.exp(-offset.astype(dtype) / decay)


class Terms(flax.struct.PyTreeNode):
    """The three terms of a part of the slots, which add up over parts, and each slot's acceptance rate 1 - TV."""

    ce: Pair
    l1: Pair
    confidence: Pair
    rate: Array  # [...]


def slot_loss(
    draft_logits: Array,
    target_probs: Array,
    outside: Array | None,
    labels: Array,
    known: Array | None,
    confidence_logits: Array | None,
    slot_weights: Array,
    *,
    weights: tuple[float, float, float] = (0.1, 0.9, 1.0),
) -> Loss:
    """The loss of slots. Arguments as of ``slot_terms``; weights: of cross entropy, L1 and confidence."""
    terms = slot_terms(draft_logits, target_probs, outside, labels, known, confidence_logits, slot_weights)
    return combine(terms.ce, terms.l1, terms.confidence, weights)


def slot_terms(
    draft_logits: Array,
    target_probs: Array,
    outside: Array | None,
    labels: Array,
    known: Array | None,
    confidence_logits: Array | None,
    slot_weights: Array,
    *,
    soft: bool = False,
) -> Terms:
    """The terms of slots over a draft vocabulary that may be part of the target's.

    Args:
        draft_logits: ``[..., Vd]``, after the sequential head.
        target_probs: ``[..., Vd]``, the target's probabilities of the draft vocabulary's tokens.
        outside: ``[...]`` target probability of all other tokens, where the draft's is 0; None: there are none.
        labels: ``[...]`` draft ids; known: ``[...]`` False where the label is outside the draft vocabulary, which
            takes the slot out of the cross entropy only. None: all are inside.
        slot_weights: ``[...]``, 0 for slots that do not count.
        soft: the cross entropy is against the target's distribution (EAGLE-3), of which tokens outside the draft
            vocabulary have no part.
    """
    log_q = jax.nn.log_softmax(draft_logits, axis=-1)
    if soft:
        ce, ce_weights = -jnp.sum(target_probs * log_q, axis=-1), slot_weights
    else:  # equation 9: cross entropy on the text
        ce = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
        ce_weights = slot_weights if known is None else jnp.where(known, slot_weights, 0)
    # Equation 10: the full L1 distance, twice the total variation.
    l1 = jnp.sum(jnp.abs(jnp.exp(log_q) - target_probs), axis=-1)
    if outside is not None:
        l1 = l1 + outside
    zero = jnp.zeros((), log_q.dtype)
    confidence = (zero, zero)
    rate = jax.lax.stop_gradient(1 - 0.5 * l1)
    if confidence_logits is not None:
        # Equation 11: binary cross entropy against the acceptance rate 1 - TV, through which no gradient flows.
        bce = jax.nn.softplus(confidence_logits) - rate * confidence_logits
        confidence = _sums(bce, slot_weights)
    return Terms(_sums(ce, ce_weights), _sums(l1, slot_weights), confidence, rate)


def _sums(values: Array, weights: Array) -> Pair:
    """Weighted sum and sum of weights; values of weight 0 do not count even where they are not finite."""
    return jnp.sum(jnp.where(weights > 0, values * weights, 0)), jnp.sum(weights)


def dspark_loss(
    draft_logits: Array,
    target_logits: Array,
    labels: Array,
    confidence_logits: Array | None,
    mask: Array,
    *,
    weights: tuple[float, float, float] = (0.1, 0.9, 1.0),
    decay: float = 4.0,
) -> Loss:
    """The loss of whole blocks, both distributions over one vocabulary.

    Args:
        draft_logits, target_logits: ``[..., K, V]``; no gradient reaches the target's.
        labels: ``[..., K]`` token ids of the text.
        confidence_logits: ``[..., K]``, or None for a drafter without the head (its term is then (0, 0)).
        mask: ``[..., K]`` bool or 0/1: the positions that count.
        weights: of cross entropy, L1 and confidence (equation 12).
        decay: of the position weights ``exp(-k / decay)``, k from 0.

    Raises ValueError where the shapes do not fit each other.
    """
    shape = draft_logits.shape[:-1]
    others = {"labels": labels, "confidence_logits": confidence_logits, "mask": mask}
    wrong = [name for name, x in others.items() if x is not None and jnp.shape(x) != shape]
    if target_logits.shape != draft_logits.shape:
        wrong.append("target_logits")
    if wrong:
        raise ValueError(f"draft_logits is {draft_logits.shape}; shapes that do not fit: {', '.join(wrong)}")
    dtype = accumulate_dtype(draft_logits.dtype)
    target_probs = jax.lax.stop_gradient(jax.nn.softmax(target_logits.astype(dtype), axis=-1))
    k = jnp.arange(shape[-1]).reshape((1,) * (len(shape) - 1) + (-1,))
    slot_weights = jnp.where(mask.astype(bool), position_weights(k, decay, jnp.dtype(dtype)), 0)
    return slot_loss(
        draft_logits.astype(dtype), target_probs, None, labels, None, confidence_logits, slot_weights, weights=weights
    )
