"""Attention of training slots: one softmax over a sequence's context and the few keys that are a slot's own.

Letters as in ``data/packing.py``; O own keys a slot.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.types import Array, accumulate_dtype


def context_attention(
    q: Array, context: tuple[Array, Array, Array], own: tuple[Array, Array, Array | np.ndarray], scale: float
) -> Array:
    """Attention ``[B, T, H, D]`` of ``q [B, T, H, D]``.

    Args:
        context: keys and values ``[B, L, Hk, D]`` that all slots of a sequence share, and which of them each slot
            sees, ``[B, T, L]``.
        own: keys and values ``[B, T, O, Hk, D]`` of each slot alone, and which of them it sees, ``[T, O]`` or
            ``[1, O]``.
    """
    (context_k, context_v, seen), (own_k, own_v, own_seen) = context, own
    dtype = accumulate_dtype(q.dtype)
    # As in ``linear``: asked for in bfloat16 it would multiply gradients, which are float32, six times over on a TPU.
    precision = None if q.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    batch, slots, heads, size = q.shape
    length, kv_heads = context_k.shape[1:3]
    # [B, Hk, g, T, D]: the g queries that share a key head are rows of one product.
    grouped = q.reshape(batch, slots, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    rows = grouped.reshape(batch, kv_heads, -1, size)
    shared = jnp.einsum("bhmd,bchd->bhmc", rows, context_k, preferred_element_type=dtype, precision=precision)
    shared = shared.reshape(*grouped.shape[:4], length)
    # At most a block's width of own keys for each slot: multiply and add, no product is that small.
    block_k = own_k.transpose(0, 3, 1, 2, 4)[:, :, None]  # [B, Hk, 1, T, O, D]
    block_v = own_v.transpose(0, 3, 1, 2, 4)[:, :, None]
    alone = jnp.sum((grouped[..., None, :] * block_k).astype(dtype), axis=-1)
    low = jnp.finfo(dtype).min
    scores = jnp.concatenate(
        [
            jnp.where(seen[:, None, None], shared * dtype.type(scale), low),
            jnp.where(jnp.asarray(own_seen)[None, None, None], alone * dtype.type(scale), low),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(context_v.dtype)
    left = weights[..., :length].reshape(batch, kv_heads, -1, length)
    out = jnp.einsum("bhmc,bchd->bhmd", left, context_v, preferred_element_type=dtype, precision=precision)
    out = out.reshape(grouped.shape) + jnp.sum(weights[..., length:, None] * block_v, axis=-2)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, slots, heads, size).astype(q.dtype)
