"""Slot attention through jax's ragged paged attention for TPU, for a verify batch or a prefill.

That kernel reads pages ``[P, page, 2 Hk, D]`` (a head's keys, then its values). Slot caches lie heads first, so the
layer that is read is re-laid before each call: a copy of its cells up to the context. Hence ``implementation=None``
does not choose this backend: it is for comparison. A draft block's own keys it cannot take.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.slot_attention.spec import Array, Cells, Own, Tokens

PAGE = 16


def refuses(q: Array, tokens: Tokens, cells: Cells, own: Own | None) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if own is not None:
        return "jax's ragged paged attention is causal: it takes no keys of a block that sees itself in both directions"
    if cells.k.shape[-1] % 128:
        return f"heads have size {cells.k.shape[-1]}, the lanes of a TPU need a multiple of 128"
    if cells.k.shape[-2] % PAGE:
        return f"slots have {cells.k.shape[-2]} cells, a page takes {PAGE}: make them a multiple"
    return None


def slot_attention(q: Array, tokens: Tokens, cells: Cells, *, scale: float, window: int, context: int) -> Array:
    """See ``api.slot_attention``."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows, width = tokens.index.shape
    pages = -(-context // PAGE)

    def read(x: Array) -> Array:
        layer = jax.lax.dynamic_index_in_dim(x, cells.layer, 0, keepdims=False)
        return layer[tokens.slot, :, : pages * PAGE]

    both = jnp.stack([read(cells.k), read(cells.v)], axis=2)  # [R, Hk, 2, context, D]
    kv_heads, size = both.shape[1], both.shape[-1]
    paged = both.reshape(rows, 2 * kv_heads, pages, PAGE, size).transpose(0, 2, 3, 1, 4)
    # A dense layout gives every request W places, used or not; a ragged one packs them.
    lengths = jnp.full(rows, width, jnp.int32) if q.shape[0] == rows * width else tokens.count
    ends: Any = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths).astype(jnp.int32)])
    return ragged_paged_attention(
        q,
        paged.reshape(rows * pages, PAGE, 2 * kv_heads, size),
        jnp.minimum(tokens.start + lengths, pages * PAGE),
        jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        ends,
        jnp.full(1, rows, jnp.int32),
        sm_scale=scale,
        sliding_window=window or None,
        num_kv_pages_per_block=min(16, pages),
        num_queries_per_block=32,
    )
