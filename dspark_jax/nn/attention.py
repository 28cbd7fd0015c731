"""Attention of padded blocks against caches, in one grouped-query form for targets and drafters.

Scores and softmax are computed in float32 (float64 for float64 models). The form of the product is chosen by the
number of query rows: see ``_scores``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.kv_cache import read_slots
from dspark_jax.layout import Layout
from dspark_jax.types import Array, accumulate_dtype
from pallas_kernels import slot_attention as kernel

_MAX_SCORES = 1 << 24
"""Scores held at once, in elements (64 MB of float32); what has more is walked in pieces of rows, then of queries."""


class KeyBlock(flax.struct.PyTreeNode):
    """Keys a query block may see: k, v ``[R, Hk, C, D]``, visible ``[R, W, C]`` bool."""

    k: Array
    v: Array
    visible: Array

    @property
    def size(self) -> int:
        """C."""
        return self.k.shape[2]

    def take(self, begin: int, end: int) -> KeyBlock:
        """The rows from ``begin`` to ``end``."""
        return jax.tree.map(lambda a: a[begin:end], self)


class CellBlock(flax.struct.PyTreeNode):
    """Keys that lie in a cache: a piece of rows is read where it is used, so that no layer's cells are copied whole.

    k, v: cells as ``kv_cache.write_rows`` takes them, with ``layer`` where they are stacked; row r is slot
    ``first_slot + r``, of which the first C cells are read. visible ``[R, W, C]``.
    """

    k: Array
    v: Array
    layer: Array | None
    first_slot: Array
    visible: Array

    @property
    def size(self) -> int:
        """C."""
        return self.visible.shape[2]

    def take(self, begin: int, end: int) -> KeyBlock:
        """The rows from ``begin`` to ``end``, read."""
        k, v = (
            read_slots(cells, self.first_slot + begin, end - begin, self.size, self.layer) for cells in (self.k, self.v)
        )
        return KeyBlock(k, v, self.visible[begin:end])


class Reach(NamedTuple):
    """Whose cells the tokens of a forward look at, and how far."""

    layout: Layout
    context: int  # cells of a slot, at most
    spread: bool = False  # the caches live on several devices


def cached_attention(
    q: Array,
    reach: Reach,
    cells: tuple[Array, Array],
    *,
    scale: float,
    window: int,
    index: Array | None = None,
    own: tuple[Array, Array] | None = None,
) -> Array:
    """Attention ``[T, H, D]`` of flat ``q [T, H, D]`` against the cells of their rows.

    By ``pallas_kernels.slot_attention`` where the device that is traced for has a kernel for it (bfloat16 on one
    Hopper), else by ``attention``, padded.

    Args:
        cells: keys and values of a layer ``[S, Hk, L, D]``, or of all layers with a leading axis, ``index`` the layer.
            Without ``own`` they hold the tokens already, and a token sees everything up to itself.
        own: keys and values ``[T, Hk, D]`` of a draft block (dense layout) that is in no cell: it sees all cells before
            it, and itself in both directions.
    """
    layout, context, spread = reach
    k, v = cells
    rows = layout.start.shape[0]
    stacked = (k, v) if index is not None else (k[None], v[None])
    slot = layout.first_slot + jnp.arange(rows, dtype=jnp.int32)
    arguments = (
        q,
        kernel.Tokens(layout.row, layout.offset, layout.index, layout.start, layout.count, slot),
        kernel.Cells(*stacked, jnp.zeros((), jnp.int32) if index is None else index),
        None if own is None else kernel.Own(*own),
    )
    name = kernel.backend(*arguments, spread=spread)
    if name != "xla":
        return kernel.slot_attention(*arguments, scale=scale, window=window, context=context, implementation=name)
    see = causal_visible if own is None else context_visible
    seen = see(layout.start, layout.width, context, window)
    blocks: list[KeyBlock | CellBlock] = [CellBlock(k, v, index, layout.first_slot, seen)]
    if own is not None:
        own_k, own_v = (layout.pad(x).swapaxes(1, 2) for x in own)
        blocks.append(KeyBlock(own_k, own_v, block_visible(rows, layout.width, window)))
    return layout.flatten(attention(layout.pad(q), blocks, scale))


def attention(q: Array, keys: Sequence[KeyBlock | CellBlock], scale: float) -> Array:
    """Softmax attention of ``q [R, W, H, D]`` over all key blocks together: ``[R, W, H, D]``.

    Several blocks (cache and own block of a drafter) share one softmax without being copied together. A query
    that sees nothing gets the mean of garbage: callers never read such rows.
    """
    rows, width, heads, _ = q.shape
    scores = heads * width * sum(block.size for block in keys)  # of one row
    at_once = max(min(_MAX_SCORES // scores, rows), 1)
    parts = [(begin, min(begin + at_once, rows)) for begin in range(0, rows, at_once)]
    out = [_attention(q[a:b], [block.take(a, b) for block in keys], scale) for a, b in parts]
    return out[0] if len(out) == 1 else jnp.concatenate(out)


def _attention(q: Array, keys: Sequence[KeyBlock], scale: float) -> Array:
    """``attention`` of rows whose scores fit, or of a single row."""
    rows, width, heads, _ = q.shape
    kv_heads = keys[0].k.shape[1]
    columns = sum(block.size for block in keys)
    pieces = -(-rows * heads * width * columns // _MAX_SCORES)
    if pieces > 1 and width % 2 == 0 and width > 16:
        half = width // 2
        return jnp.concatenate(
            [
                _attention(q[:, part], [block.replace(visible=block.visible[:, part]) for block in keys], scale)
                for part in (slice(0, half), slice(half, width))
            ],
            axis=1,
        )
    dtype = accumulate_dtype(q.dtype)
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, -1).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, -1, q.shape[-1])  # [R, Hk, g * W, D]
    scores = []
    for block in keys:
        s = _scores(grouped, block.k, dtype) * dtype.type(scale)
        s = s.reshape(rows, kv_heads, -1, width, s.shape[-1])
        scores.append(jnp.where(block.visible[:, None, None], s, jnp.finfo(dtype).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) if len(scores) > 1 else scores[0], axis=-1)
    weights = weights.reshape(rows, kv_heads, -1, columns)
    out = jnp.zeros((), dtype)
    begin = 0
    for block in keys:
        size = block.k.shape[2]
        out = out + _mix(weights[..., begin : begin + size], block.v, dtype)
        begin += size
    out = out.reshape(rows, kv_heads, heads // kv_heads, width, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, width, heads, -1).astype(q.dtype)


def _scores(q: Array, k: Array, dtype: jnp.dtype) -> Array:
    """``[R, Hk, M, D] x [R, Hk, C, D] -> [R, Hk, M, C]``."""
    return jnp.einsum("rhmd,rhcd->rhmc", q, k, preferred_element_type=dtype, precision=jax.lax.Precision.HIGHEST)


def _mix(weights: Array, v: Array, dtype: jnp.dtype) -> Array:
    """``[R, Hk, M, C] x [R, Hk, C, D] -> [R, Hk, M, D]``."""
    return jnp.einsum(
        "rhmc,rhcd->rhmd",
        weights.astype(v.dtype),
        v,
        preferred_element_type=dtype,
        precision=jax.lax.Precision.HIGHEST,
    )


def causal_visible(start: Array, width: int, context: int, window: int) -> Array:
    """``[R, W, C]``: query w of a row sits at position start + w and sees positions up to its own."""
    query = start[:, None] + jnp.arange(width)[None, :]
    key = jnp.arange(context)[None, None, :]
    visible = key <= query[:, :, None]
    if window:
        visible &= key > query[:, :, None] - window
    return visible


def context_visible(length: Array, width: int, context: int, window: int) -> Array:
    """``[R, W, C]``: every query of a draft block sees the whole context before the anchor, at position length."""
    key = jnp.arange(context)[None, None, :]
    visible = jnp.broadcast_to(key < length[:, None, None], (length.shape[0], width, context))
    if window:
        query = length[:, None] + jnp.arange(width)[None, :]
        visible &= key > query[:, :, None] - window
    return visible


def block_visible(rows: int, width: int, window: int) -> Array:
    """``[R, W, W]``: a draft block attends to itself in both directions, within the window."""
    at = jnp.arange(width)
    visible = jnp.ones((width, width), bool)
    if window:
        visible = at[None, :] > at[:, None] - window
    return jnp.broadcast_to(visible[None], (rows, width, width))
