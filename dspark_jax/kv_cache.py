"""Key/value caches. Rollback is a length: cells at positions >= length are garbage by right, never cleared.

Cells are laid out ``[S, Hk, L, D]``: the batch axes of both attention products come first, so no backend has to
transpose a cache to multiply by it (on CPU that copy was a fifth of a decoding step). Layers are a tuple where they
are unrolled and a stacked leading axis where they are scanned; this file is the one place that knows.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import LayerConfig
from dspark_jax.layout import Layout
from dspark_jax.types import Array
from pallas_kernels.dispatch import device_kind
from pallas_kernels.slot_attention.mosaic_gpu import TILE


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of every layer: a tuple of ``[S, Hk, L, D]`` or one ``[N, S, Hk, L, D]`` each.

    Invariant: values are finite, in garbage cells too (``storable``). A masked key is never looked at, but a masked
    value is multiplied by a weight of 0, and 0 * NaN would reach whoever reads the slot next.
    """

    k: tuple[Array, ...] | Array
    v: tuple[Array, ...] | Array

    @property
    def stacked(self) -> bool:
        return not isinstance(self.k, tuple)

    @property
    def length(self) -> int:
        """L, the number of cells of a slot."""
        first = self.k[0] if isinstance(self.k, tuple) else self.k
        return first.shape[-2]


def init_cache(layers: tuple[LayerConfig, ...], slots: int, length: int, dtype: Any, stacked: bool = False) -> KVCache:
    """An empty cache for ``slots`` slots of ``length`` cells.

    ``length`` must exceed the largest position ever written: writes of W cells at ``start`` need
    ``start + W <= length`` (a dynamic update clamps silently otherwise), so callers add the widest block. On a device
    whose attention kernel takes whole tiles of cells there are more of them, up to the next tile.
    """
    if device_kind() == "hopper":
        length = -(-length // TILE) * TILE

    def cells(layer: LayerConfig, lead: tuple[int, ...] = ()) -> Array:
        return jnp.zeros((*lead, slots, layer.num_kv_heads, length, layer.head_dim), dtype)

    if stacked:
        n = (len(layers),)
        return KVCache(cells(layers[0], n), cells(layers[0], n))
    return KVCache(tuple(cells(x) for x in layers), tuple(cells(x) for x in layers))


def storable(k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values ``[..., Hk, D]`` as a cache may hold them: values finite, and NaN in the key where one was not.

    The request itself still meets its NaN, through the scores; nobody else does. Of new tokens only, so it costs
    nothing beside the cells that are read.
    """
    sound = jnp.isfinite(v)
    return jnp.where(sound, k, jnp.nan), jnp.where(sound, v, 0)


def write_rows(cells: Array, new: Array, layout: Layout, layer: Array | None = None) -> Array:
    """Writes the keys (or values) of a forward into one layer's cells, in place where donated.

    Args:
        cells: ``[S, Hk, L, D]``, or ``[N, S, Hk, L, D]`` with ``layer`` the (traced) layer index.
        new: ``[R, Hk, W, D]`` of ``storable``; places at offsets >= count are garbage and land past the row's length.
        layout: row r is slot ``first_slot + r``, its first cell ``start[r]``.
    """
    if jax.default_backend() != "gpu":
        return _write_in_loop(cells, new, layout, layer)
    # One scatter, whatever the number of rows: an update a row would be a launch a row, layer and cache.
    rows, _, width, _ = new.shape
    slot = layout.first_slot + jnp.arange(rows, dtype=jnp.int32)
    place = layout.start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    at = cells.at[slot[:, None], :, place] if layer is None else cells.at[layer, slot[:, None], :, place]
    return at.set(new.astype(cells.dtype).swapaxes(1, 2), mode="drop", unique_indices=True)


def _write_in_loop(cells: Array, new: Array, layout: Layout, layer: Array | None) -> Array:
    """The same as a loop whose length XLA cannot see.

    XLA's CPU backend would fuse a bare update into the attention that reads the cells, need the old cells twice for
    it and copy every cache whole, several times a step (60 caches of 12 MB: 300 ms). It cannot fuse a loop, nor
    unroll one of unknown length, so the update stays in place.
    On a TPU a scatter would have the cells in another order of axes, and every cache copied there and back.
    """
    zero = jnp.zeros((), jnp.int32)
    new = new.astype(cells.dtype)

    def write(r: Array, cells: Array) -> Array:
        at = [layout.first_slot + r, zero, layout.start[r], zero]
        block = jax.lax.dynamic_slice_in_dim(new, r, 1, 0)
        if layer is not None:
            at, block = [layer, *at], block[None]
        return jax.lax.dynamic_update_slice(cells, block, at)

    rows = jnp.where(jnp.any(layout.start >= 0), new.shape[0], 0)  # always all of them
    return jax.lax.fori_loop(0, rows, write, cells)


def read_rows(cells: Array, layout: Layout, context: int, layer: Array | None = None) -> Array:
    """The first ``context`` cells of the forward's rows: ``[R, Hk, context, D]``."""
    return read_slots(cells, layout.first_slot, layout.start.shape[0], context, layer)


def read_slots(cells: Array, first_slot: Array, rows: int, context: int, layer: Array | None = None) -> Array:
    """The first ``context`` cells of ``rows`` slots from ``first_slot`` on: ``[rows, Hk, context, D]``."""
    slots, heads, length, size = cells.shape[-4:]
    zero = jnp.zeros((), jnp.int32)
    if layer is not None:
        # One slice, not a layer's first: that would copy the cells of every slot.
        at = (layer, first_slot, zero, zero, zero)
        return jax.lax.dynamic_slice(cells, at, (1, rows, heads, context, size))[0]
    if rows == slots and context == length:
        return cells
    return jax.lax.dynamic_slice(cells, (first_slot, zero, zero, zero), (rows, heads, context, size))
