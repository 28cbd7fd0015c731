"""The decoder shared by all target families; what differs between them is data in ``DecoderConfig``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig, LayerConfig
from dspark_jax.kv_cache import KVCache, storable, write_rows
from dspark_jax.layout import Layout
from dspark_jax.nn.attention import Reach, cached_attention
from dspark_jax.nn.block import attention_scale, layer_forward, layer_specs
from dspark_jax.nn.linear import linear
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import rope_tables
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree, accumulate_dtype


def decoder_specs(config: DecoderConfig, prefix: str = "model.") -> PyTree:
    """Abstract parameters of a target, with Hugging Face tensor names under ``prefix``."""
    shape = (config.vocab_size, config.hidden_size)
    specs = {
        "embed_tokens": ParamSpec(shape, ("vocab", "embed"), f"{prefix}embed_tokens.weight"),
        "layers": [layer_specs(config, layer, f"{prefix}layers.{i}.") for i, layer in enumerate(config.layers)],
        "norm": ParamSpec((config.hidden_size,), (None,), f"{prefix}norm.weight", init="ones"),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec(shape, ("vocab", "embed"), "lm_head.weight")
    return specs


def embed(params: PyTree, config: DecoderConfig, tokens: Array) -> Array:
    """Embeddings ``[..., d]`` of target token ids, scaled where the family does so."""
    x = params["embed_tokens"][tokens]
    if config.embed_scale != 1.0:
        # The reference rounds the factor to the model's dtype first.
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    return x


def unembed(params: PyTree, config: DecoderConfig, hidden: Array) -> Array:
    """Logits ``[..., V]`` in float32 or wider of final normed states ``[..., d]``."""
    head = params["embed_tokens"] if config.tie_embeddings else params["lm_head"]
    logits = linear(head, hidden, out_dtype=accumulate_dtype(hidden.dtype))
    if config.logit_softcap:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits


def forward(
    params: PyTree,
    config: DecoderConfig,
    tokens: Array,
    layout: Layout,
    cache: KVCache,
    *,
    taps: tuple[int, ...] = (),
    context: int | None = None,
    spread: bool = False,
) -> tuple[Array, Array, KVCache]:
    """Runs flat ``tokens [T]`` against the cache; prefill and verification are the same call.

    Args:
        taps: layer ids whose outputs are returned: i is the output of decoder layer i, -1 the embedding output.
        context: cells of the cache to attend to (static); None: all. At least ``start + W`` of every row.
        spread: weights and caches live on several devices.

    Returns:
        final states after the last norm ``[T, d]``, tapped states ``[T, len(taps) * d]`` in the order of ``taps``,
        and the cache with the tokens' keys and values written at their positions (its length is the caller's).
    """
    context = cache.length if context is None else min(context, cache.length)
    reach = Reach(layout, context, spread)
    x = embed(params, config, tokens)
    tables = _tables(config, layout, x.dtype)
    if isinstance(params["layers"], list | tuple):
        x, tapped, cache = _unrolled(params, config, x, reach, cache, tables, taps)
    else:
        x, tapped, cache = _scanned(params, config, x, reach, cache, tables, taps)
    features = jnp.concatenate(tapped, axis=-1) if taps else x[:, :0]
    return rms_norm(x, params["norm"], config.rms_norm_eps), features, cache


def _tables(config: DecoderConfig, layout: Layout, dtype: Any) -> dict[LayerConfig, tuple[Array, Array]]:
    """cos and sin once for every distinct kind of layer."""
    position = layout.position
    made: dict[Any, tuple[Array, Array]] = {}
    for layer in config.layers:
        key = (layer.rope, layer.head_dim)
        if key not in made:
            made[key] = rope_tables(layer.rope, layer.head_dim, position, accumulate_dtype(dtype))
    return {layer: made[(layer.rope, layer.head_dim)] for layer in config.layers}


def _attend(
    config: DecoderConfig,
    layer: LayerConfig,
    reach: Reach,
    cells: tuple[Array, Array],
    index: Array | None,
    qkv: tuple[Array, Array, Array],
) -> tuple[Array, tuple[Array, Array]]:
    """Writes the tokens' keys and values, then attends to everything up to each token's own position."""
    layout = reach.layout
    k, v = (layout.pad(a).swapaxes(1, 2) for a in storable(*qkv[1:]))
    cells = (write_rows(cells[0], k, layout, index), write_rows(cells[1], v, layout, index))
    scale = attention_scale(config, layer)
    return cached_attention(qkv[0], reach, cells, scale=scale, window=layer.window, index=index), cells


def _unrolled(params, config, x, reach, cache, tables, taps):  # type: ignore[no-untyped-def]
    """Layers as separate code: the fast form on CPU, and the only one for layers of different shapes."""
    outputs = {-1: x} if -1 in taps else {}
    keys, values = list(cache.k), list(cache.v)
    for i, layer in enumerate(config.layers):

        def attend(q, k, v, i=i, layer=layer):  # type: ignore[no-untyped-def]
            cells = (keys[i], values[i])
            return _attend(config, layer, reach, cells, None, (q, k, v))

        with jax.named_scope(f"layer_{i}"):
            x, (keys[i], values[i]) = layer_forward(config, layer, params["layers"][i], x, tables[layer], attend)
        if i in taps:
            outputs[i] = x
    return x, [outputs[i] for i in taps], KVCache(tuple(keys), tuple(values))


def _scanned(params, config, x, reach, cache, tables, taps):  # type: ignore[no-untyped-def]
    """Layers as one ``lax.scan``, the caches in its carry: as scanned inputs they would be copied whole."""
    layer = config.layers[0]
    slots = [taps.index(i) if i in taps else len(taps) for i in range(config.num_layers)]
    tapped = jnp.zeros((len(taps) + 1, *x.shape), x.dtype)
    if -1 in taps:
        tapped = tapped.at[taps.index(-1)].set(x)

    def body(carry, scanned):  # type: ignore[no-untyped-def]
        x, k_cells, v_cells, tapped = carry
        weights, index, slot = scanned

        def attend(q, k, v):  # type: ignore[no-untyped-def]
            cells = (k_cells, v_cells)
            return _attend(config, layer, reach, cells, index, (q, k, v))

        x, (new_k, new_v) = layer_forward(config, layer, weights, x, tables[layer], attend)
        return (x, new_k, new_v, tapped.at[slot].set(x)), None

    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    xs = (params["layers"], indices, jnp.asarray(slots, jnp.int32))
    (x, k_cells, v_cells, tapped), _ = jax.lax.scan(body, (x, cache.k, cache.v, tapped), xs)
    return x, [tapped[i] for i in range(len(taps))], KVCache(k_cells, v_cells)
