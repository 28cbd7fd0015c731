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
from dspark_jax.train.context_attention import context_attention
from dspark_jax.types import Array, PyTree, accumulate_dtype


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
            seen = context_visible(anchor, slots.position, length, layer.window)
            index, own_seen = plan.own
            if layer.window:
                own_seen = own_seen & (np.arange(plan.widest) > plan.offset[:, None] - layer.window)
            own = (own_k[:, index], own_v[:, index], own_seen)
            out = context_attention(q, (k, v, seen), own, attention_scale(decoder, layer))
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
        markov = params["markov"]
        z, e = _markov(config, markov, plan, slots.previous, hidden)
        # A whole vocabulary ends here with the tokenizer's last token (``TeacherHead``); W2 has a row for each of the
        # target's, those beyond it are never drafted and get no gradient.
        logits = logits + markov_bias({"w2": markov["w2"][: logits.shape[-1]]}, z)
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


def context_visible(anchor: Array, position: Array, length: int, window: int) -> Array:
    """``[B, T, L]``: the context of a block ends before its anchor."""
    key = jnp.arange(length)[None, None, :]
    visible = key < anchor[:, :, None]
    if window:
        visible &= key > position[:, :, None] - window
    return visible
