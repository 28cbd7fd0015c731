"""Slot attention in plain XLA, float32 inside: what every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.slot_attention.spec import Array, Cells, Own, Tokens, visible


def slot_attention(
    q: Array, tokens: Tokens, cells: Cells, own: Own | None, *, scale: float, window: int, context: int
) -> Array:
    """See ``api.slot_attention``. Tokens past their request's count get garbage."""
    f32, high = jnp.float32, jax.lax.Precision.HIGHEST
    k, v = (jax.lax.dynamic_index_in_dim(x, cells.layer, 0, keepdims=False) for x in (cells.k, cells.v))
    k, v = (x[tokens.slot, :, :context].astype(f32) for x in (k, v))  # [R, Hk, context, D]
    heads, kv_heads = q.shape[1], k.shape[1]
    seen, block = visible(tokens, context, window, own is not None)
    if own is not None and block is not None:
        mine = (x[tokens.index].swapaxes(1, 2).astype(f32) for x in (own.k, own.v))
        k, v = (jnp.concatenate([a, b], axis=2) for a, b in zip((k, v), mine, strict=True))
        seen = jnp.concatenate([seen, block], axis=2)
    padded = q[tokens.index].astype(f32)  # [R, W, H, D]
    grouped = padded.reshape(*padded.shape[:2], kv_heads, heads // kv_heads, -1)
    scores = jnp.einsum("rwhgd,rhcd->rhgwc", grouped, k, precision=high) * scale
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, jnp.finfo(f32).min), axis=-1)
    out = jnp.einsum("rhgwc,rhcd->rwhgd", weights, v, precision=high).reshape(padded.shape)
    return out[tokens.row, tokens.offset].astype(q.dtype)
