"""Slot attention through jax's ragged paged attention for TPU, for a verify batch or a prefill.

That kernel reads pages ``[P, page, 2 Hk, D]`` (a head's keys, then its values). Slot caches lie heads first, so the
layer that is read is re-laid before each call: a copy of its cells up to the context. Hence ``implementation=None``
does not choose this backend: it is for comparison. A draft block's own keys it cannot take, and the interpreter on a
CPU cannot run it (it reshapes references).
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
        return layer[tokens.slot, :, : pages * PAGE].swapaxes(1, 2)

    paged = jnp.stack([read(cells.k), read(cells.v)], axis=3)  # [R, context, Hk, 2, D]
    kv_heads, size = paged.shape[2], paged.shape[-1]
    # A dense layout gives every request W places, used or not; a ragged one packs them.
    lengths = jnp.full(rows, width, jnp.int32) if q.shape[0] == rows * width else tokens.count
    ends: Any = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths).astype(jnp.int32)])
    # The kernel fetches cells ahead, request by request: one without cells would leave a copy that nobody waits for,
    # and idle requests at the end would be where it begins with the next heads.
    used = jnp.max(jnp.where(lengths > 0, jnp.arange(1, rows + 1, dtype=jnp.int32), 1))
    out = ragged_paged_attention(
        q,
        paged.reshape(rows * pages, PAGE, 2 * kv_heads, size),
        jnp.clip(tokens.start + lengths, 1, pages * PAGE),
        jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        ends,
        used[None],
        sm_scale=scale,
        sliding_window=window or None,
        num_kv_pages_per_block=min(16, pages),
        num_queries_per_block=32,
    )
    written = jnp.arange(q.shape[0]) < ends[-1]  # behind it is what was in memory
    return jnp.where(written[:, None, None], out, 0)
