"""From a batch of text to the loss: teacher, anchors, packed forward, heads. Pure functions, jitted in ``step.py``."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots, pack, sample_anchors
from dspark_jax.drafters.base import SharedParams
from dspark_jax.targets import Target
from dspark_jax.train.block_forward import packed_heads, packed_hidden
from dspark_jax.train.config import LossConfig
from dspark_jax.train.loss import Loss, position_weights, slot_loss
from dspark_jax.train.teacher import TeacherHead, teacher_states
from dspark_jax.types import Array, PyTree


@flax.struct.dataclass
class Frozen:
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
        shared = SharedParams(
            target.params["embed_tokens"], head.inside, None if d2t is None else jnp.asarray(d2t)
        )
        return cls(target, shared, head, draft_ids)


@flax.struct.dataclass
class Lesson:
    """A packed batch and what the teacher says about it."""

    slots: Slots
    features: Array  # [B, L, m * d]
    probs: Array  # [B, L, Vd] target probabilities of the next token
    outside: Array | None  # [B, L]
    top_inside: Array  # [B, L] bool


def prepare(
    config: DrafterConfig, frozen: Frozen, plan: BlockPlan, key: Array, tokens: Array, loss_mask: Array
) -> Lesson:
    """Runs the target over ``tokens [B, L]`` and draws the anchors."""
    with jax.named_scope("teacher"):
        final, features = teacher_states(frozen.target, tokens, config.target_layer_ids)
        rows, length, _ = final.shape
        answers = frozen.head(final.reshape(rows * length, -1))
        probs, outside, top_inside = (None if a is None else a.reshape(rows, length, *a.shape[1:]) for a in answers)
    anchors, keep = sample_anchors(key, loss_mask, plan.anchors)
    slots = pack(plan, anchors, keep, tokens, loss_mask, config.mask_token_id)
    return Lesson(slots, features, probs, outside, top_inside)


def rows_of(values: Array, row: Array) -> Array:
    """``values [B, L, ...]`` at ``row [B, T]``: ``[B, T, ...]``."""
    return values[jnp.arange(values.shape[0])[:, None], row]


def loss(
    config: DrafterConfig, settings: LossConfig, frozen: Frozen, plan: BlockPlan, params: PyTree, lesson: Lesson
) -> Loss:
    """Equations 8 to 12 over the slots of a batch."""
    slots = lesson.slots
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
    config: DrafterConfig, frozen: Frozen, plan: BlockPlan, params: PyTree, lesson: Lesson
) -> dict[str, Array]:
    """Teacher-forced acceptance of every slot ``[B, T]``: 1 - TV (``rate``), whether both arg-max agree
    (``agree``), the confidence head's probability (``confidence``), and ``mask``."""
    slots = lesson.slots
    hidden = packed_hidden(config, params, frozen.shared, lesson.features, plan, slots)
    logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
    p = rows_of(lesson.probs, slots.row)
    rate = jnp.sum(jnp.minimum(jax.nn.softmax(logits, axis=-1), p), axis=-1)
    agree = (jnp.argmax(logits, axis=-1) == jnp.argmax(p, axis=-1)) & rows_of(lesson.top_inside, slots.row)
    sure = jnp.zeros_like(rate) if confidence is None else jax.nn.sigmoid(confidence)
    return {"rate": rate, "agree": agree.astype(rate.dtype), "confidence": sure, "mask": slots.mask}
