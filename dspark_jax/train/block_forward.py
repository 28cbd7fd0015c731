"""The drafter's teacher-forced forward over packed blocks.

The same layers as ``drafters/dflash.py`` runs at decoding, with another attention: every slot of every block of a
sequence is a query in one product against the sequence's context keys, and sees the keys before its anchor plus
its own block. Letters as in ``data/packing.py``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots
from dspark_jax.drafters.base import SharedParams
from dspark_jax.drafters.dflash import base_logits, context_features
from dspark_jax.heads.confidence import confidence_logits
from dspark_jax.heads.markov import markov_bias, teacher_forced
from dspark_jax.nn.block import attention_scale, keys_values, layer_forward
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import rope_tables
from dspark_jax.types import Array, PyTree, accumulate_dtype

_HIGHEST = jax.lax.Precision.HIGHEST


def packed_hidden(
    config: DrafterConfig, params: PyTree, shared: SharedParams, features: Array, plan: BlockPlan, slots: Slots
) -> Array:
    """Backbone states ``[B, T, d]`` after the final norm.

    Args:
        features: ``[B, L, m * d]`` tapped target states of whole sequences; each slot reads those before its
            anchor only.
    """
    decoder = config.decoder
    batch, length, _ = features.shape
    context = context_features(config, params, features.reshape(batch * length, -1))
    context_position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    anchor = slots.anchors[:, jnp.asarray(plan.block)]
    x = shared.embed[slots.tokens.reshape(-1)]
    if decoder.embed_scale != 1.0:
        x = x * jnp.asarray(decoder.embed_scale, x.dtype)
    for i, layer in enumerate(decoder.layers):
        weights, wide = params["layers"][i], accumulate_dtype(x.dtype)
        tables = rope_tables(layer.rope, layer.head_dim, context_position, wide)
        k, v = (
            a.reshape(batch, length, *a.shape[1:])
            for a in keys_values(decoder, layer, weights["attn"], context, tables)
        )
        tables = rope_tables(layer.rope, layer.head_dim, slots.position.reshape(-1), wide)

        def attend(q, own_k, own_v, k=k, v=v, layer=layer):  # type: ignore[no-untyped-def]
            q, own_k, own_v = (a.reshape(batch, plan.slots, *a.shape[1:]) for a in (q, own_k, own_v))
            seen = _context_visible(anchor, slots.position, length, layer.window)
            out = _attention(q, own_k, own_v, k, v, seen, plan, attention_scale(decoder, layer), layer.window)
            return out.reshape(batch * plan.slots, *out.shape[2:]), None

        with jax.named_scope(f"draft_layer_{i}"):
            x, _ = layer_forward(decoder, layer, weights, x, tables, attend)
    return rms_norm(x, params["norm"], decoder.rms_norm_eps).reshape(batch, plan.slots, -1)


def packed_heads(
    config: DrafterConfig, params: PyTree, shared: SharedParams, plan: BlockPlan, slots: Slots, hidden: Array
) -> tuple[Array, Array | None]:
    """Logits after the sequential head ``[B, T, Vd]`` and confidence logits ``[B, T]`` (None without the head)."""
    logits = base_logits(config, shared, hidden)
    e = None
    if config.markov_rank:
        z, e = _markov(config, params["markov"], plan, slots.previous, hidden)
        logits = logits + markov_bias(params["markov"], z)
    confidence = None
    if config.confidence_head:
        confidence = confidence_logits(config, params["confidence"], hidden, e)
    return logits, confidence


def _markov(
    config: DrafterConfig, params: PyTree, plan: BlockPlan, previous: Array, hidden: Array
) -> tuple[Array, Array]:
    """z and e ``[B, T, r]``; only the recurrent head needs the slots as blocks."""
    if config.markov_head != "rnn":
        return teacher_forced(config, params, previous, hidden)
    batch = previous.shape[0]
    first = jnp.asarray(plan.own[0][plan.offset == 0])  # [A, K] slots of every block
    previous, hidden = previous[:, first], hidden[:, first]
    z, e = teacher_forced(
        config, params, previous.reshape(-1, plan.widest), hidden.reshape(-1, plan.widest, hidden.shape[-1])
    )
    z, e = (a.reshape(batch, plan.anchors, plan.widest, -1)[:, plan.block, plan.offset] for a in (z, e))
    return z, e


def _context_visible(anchor: Array, position: Array, length: int, window: int) -> Array:
    """``[B, T, L]``: the context of a block ends before its anchor."""
    key = jnp.arange(length)[None, None, :]
    visible = key < anchor[:, :, None]
    if window:
        visible &= key > position[:, :, None] - window
    return visible


def _attention(
    q: Array,
    own_k: Array,
    own_v: Array,
    context_k: Array,
    context_v: Array,
    seen: Array,
    plan: BlockPlan,
    scale: float,
    window: int,
) -> Array:
    """One softmax over the context before the anchor and the slot's own block.

    Args:
        q: ``[B, T, H, D]``. own_k, own_v: ``[B, T, Hk, D]`` of the slots. context_k, context_v: ``[B, L, Hk, D]``.
        seen: ``[B, T, L]``.
    """
    dtype = accumulate_dtype(q.dtype)
    batch, slots, heads, size = q.shape
    kv_heads, length = own_k.shape[2], context_k.shape[1]
    index, own_seen = plan.own
    if window:
        own_seen = own_seen & (np.arange(plan.widest) > plan.offset[:, None] - window)
    # [B, Hk, g, T, D]: the g queries that share a key head are rows of one product.
    grouped = q.reshape(batch, slots, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    rows = grouped.reshape(batch, kv_heads, -1, size)
    context = jnp.einsum("bhmd,bchd->bhmc", rows, context_k, preferred_element_type=dtype, precision=_HIGHEST)
    context = context.reshape(*grouped.shape[:4], length)
    # At most a block's width of own keys for each slot: multiply and add, no product is that small.
    block_k = own_k[:, index].transpose(0, 3, 1, 2, 4)[:, :, None]  # [B, Hk, 1, T, K, D]
    block_v = own_v[:, index].transpose(0, 3, 1, 2, 4)[:, :, None]
    own = jnp.sum((grouped[..., None, :] * block_k).astype(dtype), axis=-1)
    low = jnp.finfo(dtype).min
    scores = jnp.concatenate(
        [
            jnp.where(seen[:, None, None], context * dtype.type(scale), low),
            jnp.where(jnp.asarray(own_seen)[None, None, None], own * dtype.type(scale), low),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(context_v.dtype)
    left = weights[..., :length].reshape(batch, kv_heads, -1, length)
    out = jnp.einsum("bhmc,bchd->bhmd", left, context_v, preferred_element_type=dtype, precision=_HIGHEST)
    out = out.reshape(grouped.shape) + jnp.sum(weights[..., length:, None] * block_v, axis=-2)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, slots, heads, size).astype(q.dtype)
