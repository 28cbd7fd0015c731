"""From a batch of text to the loss: teacher, anchors, packed forward, heads. Pure functions, jitted in ``step.py``."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots, pack
from dspark_jax.drafters.base import SharedParams
from dspark_jax.targets import Target
from dspark_jax.train.block_forward import packed_heads, packed_hidden
from dspark_jax.train.config import LossConfig
from dspark_jax.train.loss import Loss, position_weights, slot_loss
from dspark_jax.train.teacher import TeacherHead, teacher_states
from dspark_jax.types import Array, PyTree


class Frozen(flax.struct.PyTreeNode):
    """All that training does not change."""

    target: Target
    shared: SharedParams
    head: TeacherHead
    draft_ids: Array | None  # [V] int32 draft id of each target id, -1 outside; None: the whole vocabulary

    @classmethod
    def build(cls, target: Target, d2t: np.ndarray | None) -> Frozen:
        """From a target and the draft vocabulary's target ids."""
        head = TeacherHead.build(target, d2t)
        draft_ids = None
        if d2t is not None:
            ids = np.full(target.vocab_size, -1, np.int32)
            ids[d2t] = np.arange(len(d2t))
            draft_ids = jnp.asarray(ids)
        shared = SharedParams(target.params["embed_tokens"], head.inside, None if d2t is None else jnp.asarray(d2t))
        return cls(target, shared, head, draft_ids)


class Lesson(flax.struct.PyTreeNode):
    """Text and what the teacher says about it."""

    tokens: Array  # [B, L]
    loss_mask: Array  # [B, L] bool
    features: Array  # [B, L, m * d]
    probs: Array  # [B, L, Vd] target probabilities of the next token
    outside: Array | None  # [B, L]
    top_inside: Array  # [B, L] bool


def prepare(config: DrafterConfig, frozen: Frozen, tokens: Array, loss_mask: Array) -> Lesson:
    """Runs the target over ``tokens [B, L]``."""
    with jax.named_scope("teacher"):
        final, features = teacher_states(frozen.target, tokens, config.target_layer_ids)
        rows, length, _ = final.shape
        probs, outside, top_inside = frozen.head(final.reshape(rows * length, -1))
    return Lesson(
        tokens,
        loss_mask,
        features,
        probs.reshape(rows, length, -1),
        None if outside is None else outside.reshape(rows, length),
        top_inside.reshape(rows, length),
    )


def blocks(config: DrafterConfig, plan: BlockPlan, lesson: Lesson, anchors: Array, keep: Array) -> Slots:
    """The packed blocks behind ``anchors [B, A]`` of a lesson's text."""
    return pack(plan, anchors, keep, lesson.tokens, lesson.loss_mask, config.mask_token_id)


def rows_of(values: Array, row: Array) -> Array:
    """``values [B, L, ...]`` at ``row [B, T]``: ``[B, T, ...]``."""
    return values[jnp.arange(values.shape[0])[:, None], row]


def loss(
    config: DrafterConfig,
    settings: LossConfig,
    frozen: Frozen,
    plan: BlockPlan,
    params: PyTree,
    lesson: Lesson,
    slots: Slots,
) -> Loss:
    """Equations 8 to 12 over packed slots."""
    with jax.named_scope("draft"):
        hidden = packed_hidden(config, params, frozen.shared, lesson.features, plan, slots)
        logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
    with jax.named_scope("loss"):
        labels, known = slots.labels, None
        if frozen.draft_ids is not None:
            labels = frozen.draft_ids[labels]
            known = labels >= 0
            labels = jnp.maximum(labels, 0)
        decay = position_weights(jnp.asarray(plan.offset), settings.decay, logits.dtype)
        return slot_loss(
            logits,
            rows_of(lesson.probs, slots.row),
            None if lesson.outside is None else rows_of(lesson.outside, slots.row),
            labels,
            known,
            confidence,
            jnp.where(slots.mask, decay[None, :], 0),
            weights=(settings.weights[0], settings.weights[1], settings.weights[2]),
        )


def acceptance(
    config: DrafterConfig, frozen: Frozen, plan: BlockPlan, params: PyTree, lesson: Lesson, slots: Slots
) -> dict[str, Array]:
    """Teacher-forced acceptance of every slot ``[B, T]``: 1 - TV (``rate``), whether both arg-max agree
    (``agree``), the confidence head's probability (``confidence``), and ``mask``."""
    hidden = packed_hidden(config, params, frozen.shared, lesson.features, plan, slots)
    logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
    p = rows_of(lesson.probs, slots.row)
    rate = jnp.sum(jnp.minimum(jax.nn.softmax(logits, axis=-1), p), axis=-1)
    agree = (jnp.argmax(logits, axis=-1) == jnp.argmax(p, axis=-1)) & rows_of(lesson.top_inside, slots.row)
    sure = jnp.zeros_like(rate) if confidence is None else jax.nn.sigmoid(confidence)
    return {"rate": rate, "agree": agree.astype(rate.dtype), "confidence": sure, "mask": slots.mask}
