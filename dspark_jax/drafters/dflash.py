"""The DFlash backbone: all positions of a block in one parallel pass over injected target features.

Context features are ``RMSNorm(fc(concatenated taps))``; every layer turns the same features into its own keys and
values. The block is the anchor (last committed token, not yet seen by the target) and mask tokens, attending to the
whole context and to each other in both directions. Context keys and values are cached across rounds.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import DraftState, SharedParams
from dspark_jax.kv_cache import KVCache, storable, write_rows
from dspark_jax.layout import Layout, dense_layout
from dspark_jax.nn.attention import Reach, cached_attention
from dspark_jax.nn.block import attention_scale, keys_values, layer_forward, layer_specs
from dspark_jax.nn.linear import linear
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import rope_tables
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree, accumulate_dtype


def backbone_specs(config: DrafterConfig) -> PyTree:
    """Abstract parameters of the backbone, with DeepSpec's tensor names (embedding and head are shared)."""
    decoder = config.decoder
    d, taps = decoder.hidden_size, len(config.target_layer_ids)
    return {
        "fc": ParamSpec((d, taps * d), ("embed", None), "fc.weight", scale=1 / math.sqrt(taps * d)),
        "hidden_norm": ParamSpec((d,), (None,), "hidden_norm.weight", init="ones"),
        "layers": [layer_specs(decoder, layer, f"layers.{i}.") for i, layer in enumerate(decoder.layers)],
        "norm": ParamSpec((d,), (None,), "norm.weight", init="ones"),
    }


def context_features(config: DrafterConfig, params: PyTree, features: Array) -> Array:
    """``[T, m * d]`` tapped target states to the ``[T, d]`` that feeds every layer."""
    return rms_norm(linear(params["fc"], features), params["hidden_norm"], config.decoder.rms_norm_eps)


def absorb(config: DrafterConfig, params: PyTree, state: DraftState, features: Array, layout: Layout) -> DraftState:
    """Writes the context keys and values of flat ``features [T, m * d]`` at their positions.

    Everything verified is written; what was rejected lies past the length and is overwritten later.
    """
    decoder = config.decoder
    context = context_features(config, params, features)
    keys, values = list(state.cache.k), list(state.cache.v)
    position = layout.position
    for i, layer in enumerate(decoder.layers):
        tables = rope_tables(layer.rope, layer.head_dim, position, accumulate_dtype(context.dtype))
        k, v = storable(*keys_values(decoder, layer, params["layers"][i]["attn"], context, tables))
        keys[i] = write_rows(keys[i], layout.pad(k).swapaxes(1, 2), layout)
        values[i] = write_rows(values[i], layout.pad(v).swapaxes(1, 2), layout)
    return DraftState(KVCache(tuple(keys), tuple(values)))


def block_hidden(
    config: DrafterConfig,
    params: PyTree,
    shared: SharedParams,
    state: DraftState,
    anchor: Array,
    length: Array,
    width: int,
    context: int | None = None,
    spread: bool = False,
) -> Array:
    """Backbone states ``[R, width, d]`` after the final norm.

    Args:
        anchor: ``[R]`` token ids at positions ``length [R]``, where the block begins; rows are slots 0..R-1.
        width: slots of the block (static), anchor included.
        context: cells of the cache to attend to (static); None: all.
        spread: weights and caches live on several devices.
    """
    decoder = config.decoder
    rows = anchor.shape[0]
    context = state.cache.length if context is None else min(context, state.cache.length)
    layout = dense_layout(length, jnp.full(rows, width), width)
    reach = Reach(layout, context, spread)
    masks = jnp.full((rows, width - 1), config.mask_token_id, anchor.dtype)
    tokens = jnp.concatenate([anchor[:, None], masks], axis=1).reshape(-1)
    x = shared.embed[tokens]
    if decoder.embed_scale != 1.0:
        x = x * jnp.asarray(decoder.embed_scale, x.dtype)
    for i, layer in enumerate(decoder.layers):
        tables = rope_tables(layer.rope, layer.head_dim, layout.position, accumulate_dtype(x.dtype))
        cells = (state.cache.k[i], state.cache.v[i])

        def attend(q, k, v, cells=cells, layer=layer):  # type: ignore[no-untyped-def]
            scale = attention_scale(decoder, layer)
            return cached_attention(q, reach, cells, scale=scale, window=layer.window, own=(k, v)), None

        with jax.named_scope(f"draft_layer_{i}"):
            x, _ = layer_forward(decoder, layer, params["layers"][i], x, tables, attend)
    return layout.pad(rms_norm(x, params["norm"], decoder.rms_norm_eps))


def base_logits(config: DrafterConfig, shared: SharedParams, hidden: Array) -> Array:
    """Logits ``[..., Vd]`` before the sequential head, soft-capped where the family does so."""
    logits = linear(shared.head, hidden, out_dtype=accumulate_dtype(hidden.dtype))
    if config.logit_softcap:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits
