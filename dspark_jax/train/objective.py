"""From a batch of text to the loss: teacher, anchors, packed forward, heads. Pure functions, jitted in ``step.py``."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots, pack
from dspark_jax.drafters.base import SharedParams
from dspark_jax.targets import Target
from dspark_jax.train.block_forward import packed_heads, packed_hidden
from dspark_jax.train.chain_forward import chain_hidden
from dspark_jax.train.config import LossConfig
from dspark_jax.train.loss import Loss, Pair, combine, position_weights, slot_terms
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
    """Text and what the teacher says about it. Either the final states, or the probabilities made of them."""

    tokens: Array  # [B, L]
    loss_mask: Array  # [B, L] bool
    features: Array  # [B, L, m * d]
    final: Array | None  # [B, L, d]
    probs: Array | None  # [B, L, Vd] target probabilities of the next token
    outside: Array | None  # [B, L]
    top_inside: Array | None  # [B, L] bool


def prepare(
    config: DrafterConfig,
    frozen: Frozen,
    tokens: Array,
    loss_mask: Array,
    chunks: int = 0,
    states: tuple[Array, Array] | None = None,
) -> Lesson:
    """Runs the target over ``tokens [B, L]``, unless its ``states`` (``teacher_states``) are known already; with
    ``chunks`` the head is left to where the loss is."""
    with jax.named_scope("teacher"):
        if states is None:
            final, features = teacher_states(frozen.target, tokens, config.target_layer_ids)
        else:
            final, features = (x.astype(frozen.target.dtype) for x in states)
        if chunks:
            return Lesson(tokens, loss_mask, features, final, None, None, None)
        rows, length, _ = final.shape
        probs, outside, top_inside = frozen.head(final.reshape(rows * length, -1))
    return Lesson(
        tokens,
        loss_mask,
        features,
        None,
        probs.reshape(rows, length, -1),
        None if outside is None else outside.reshape(rows, length),
        top_inside.reshape(rows, length),
    )


def blocks(config: DrafterConfig, plan: BlockPlan, lesson: Lesson, anchors: Array, keep: Array) -> Slots:
    """The packed blocks behind ``anchors [B, A]`` of a lesson's text. A chain needs a state before its anchor."""
    if config.chain:
        keep = keep & (anchors > 0)
    return pack(plan, anchors, keep, lesson.tokens, lesson.loss_mask, config.mask_token_id)


def rows_of(values: Array, row: Array) -> Array:
    """``values [B, L, ...]`` at ``row [B, T]``: ``[B, T, ...]``."""
    return values[jnp.arange(values.shape[0])[:, None], row]


def teacher_rows(frozen: Frozen, lesson: Lesson, row: Array) -> tuple[Array, Array | None, Array]:
    """Probabilities ``[B, T, Vd]``, mass outside ``[B, T]`` and "the top token is inside" ``[B, T]`` at ``row``."""
    if lesson.final is not None:
        states = rows_of(lesson.final, row)
        probs, outside, top = frozen.head(states.reshape(-1, states.shape[-1]))
        outside = None if outside is None else outside.reshape(row.shape)
        return probs.reshape(*row.shape, -1), outside, top.reshape(row.shape)
    known: Any = lesson  # its probabilities are there
    outside = None if lesson.outside is None else rows_of(lesson.outside, row)
    return rows_of(known.probs, row), outside, rows_of(known.top_inside, row)


def slot_states(
    config: DrafterConfig, frozen: Frozen, plan: BlockPlan, params: PyTree, lesson: Lesson, slots: Slots
) -> Array:
    """States ``[B, T, d]`` from which the slots' logits are made, of a block drafter or a chain."""
    if config.chain:
        return chain_hidden(config, params, frozen.shared, lesson.features, lesson.tokens, plan, slots)
    return packed_hidden(config, params, frozen.shared, lesson.features, plan, slots)


def loss(
    config: DrafterConfig,
    settings: LossConfig,
    frozen: Frozen,
    plan: BlockPlan,
    params: PyTree,
    lesson: Lesson,
    slots: Slots,
) -> tuple[Loss, Pair]:
    """Equations 8 to 12 over packed slots, and the expected accepted length as a (sum, blocks) pair."""
    with jax.named_scope("draft"):
        hidden = slot_states(config, frozen, plan, params, lesson, slots)

    def part(plan: BlockPlan, slots: Slots, hidden: Array) -> tuple[tuple[Pair, Pair, Pair, Pair], tuple[()]]:
        with jax.named_scope("heads"):
            logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
            probs, outside, _ = teacher_rows(frozen, lesson, slots.row)
        labels, known = slots.labels, None
        if frozen.draft_ids is not None:
            labels = frozen.draft_ids[labels]
            known = labels >= 0
            labels = jnp.maximum(labels, 0)
        decay = position_weights(jnp.asarray(plan.offset), settings.decay, logits.dtype)
        weights = jnp.where(slots.mask, decay[None, :], 0)
        terms = slot_terms(logits, probs, outside, labels, known, confidence, weights, soft=settings.soft)
        return (terms.ce, terms.l1, terms.confidence, expected_length(plan, terms.rate, slots.mask)), ()

    with jax.named_scope("loss"):
        (ce, l1, confidence, length), _ = over_chunks(part, plan, settings.chunks, slots, hidden)
        return combine(ce, l1, confidence, (settings.weights[0], settings.weights[1], settings.weights[2])), length


def over_chunks(part: Any, plan: BlockPlan, chunks: int, slots: Slots, hidden: Array) -> tuple[Any, Any]:
    """``part(plan, slots, hidden) -> (sums, rows [B, T])`` over equal parts of the anchors, one after the other.

    Sums are added, rows laid end to end. Nothing of a part outlives it: what the gradient needs is computed again,
    so that logits of a large vocabulary exist for one part at a time. chunks 0: all at once.
    """
    if not chunks:
        return part(plan, slots, hidden)
    small = plan.part(chunks)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)

    def step(sums: Any, inputs: tuple[Slots, Array]) -> tuple[Any, Any]:
        new, rows = part(small, *inputs)
        return jax.tree.map(jnp.add, sums, new), rows

    pieces = (jax.tree.map(cut, slots), cut(hidden))
    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(lambda x: part(small, *x)[0], first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, rows = jax.lax.scan(jax.checkpoint(step), zeros, pieces)
    return sums, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), rows)


def expected_length(plan: BlockPlan, rate: Array, mask: Array) -> Pair:
    """1 + the sum of cumulative products of acceptance rates ``[B, T]``, over whole blocks of the widest width: their
    sum and number. What a block would be worth at temperature 1 along the text."""
    first = np.cumsum((0, *plan.widths[:-1]))[np.asarray(plan.widths) == plan.widest]
    at = first[:, None] + np.arange(plan.widest)
    whole = mask[:, at].all(-1)
    lengths = 1 + jnp.cumprod(rate[:, at], axis=-1).sum(-1)
    return jnp.sum(jnp.where(whole, lengths, 0)), jnp.sum(whole).astype(rate.dtype)


def acceptance(
    config: DrafterConfig,
    frozen: Frozen,
    plan: BlockPlan,
    params: PyTree,
    lesson: Lesson,
    slots: Slots,
    chunks: int = 0,
) -> dict[str, Array]:
    """Teacher-forced acceptance of every slot ``[B, T]``: 1 - TV (``rate``), whether both arg-max agree
    (``agree``), the confidence head's probability (``confidence``), and ``mask``."""
    hidden = slot_states(config, frozen, plan, params, lesson, slots)

    def part(plan: BlockPlan, slots: Slots, hidden: Array) -> tuple[tuple[()], dict[str, Array]]:
        logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
        p, _, top_inside = teacher_rows(frozen, lesson, slots.row)
        rate = jnp.sum(jnp.minimum(jax.nn.softmax(logits, axis=-1), p), axis=-1)
        agree = (jnp.argmax(logits, axis=-1) == jnp.argmax(p, axis=-1)) & top_inside
        sure = jnp.zeros_like(rate) if confidence is None else jax.nn.sigmoid(confidence)
        return (), {"rate": rate, "agree": agree.astype(rate.dtype), "confidence": sure, "mask": slots.mask}

    return over_chunks(part, plan, chunks, slots, hidden)[1]
