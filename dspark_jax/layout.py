"""Flat for matmuls, padded only for attention (DESIGN section 2, idea 2).

The tokens of a forward are flattened to ``[T]``; a ``Layout`` knows which row and offset each one has. Only
attention re-pads to ``[R, W]``. So a shorter admission makes a smaller forward, before any custom kernel exists.
"""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp

from dspark_jax.types import Array


class Layout(flax.struct.PyTreeNode):
    """Where the T flat tokens of a forward sit. Row r is cache slot ``first_slot + r``."""

    first_slot: Array  # [] int32
    start: Array  # [R] int32: position of a row's first token = valid cells before it
    count: Array  # [R] int32: tokens of the row, 0 for a row that takes no part
    row: Array  # [T] int32: padding tokens point at some row and are never read back
    offset: Array  # [T] int32
    index: Array  # [R, W] int32: flat index of (row, offset); places past count point anywhere
    width: int = flax.struct.field(pytree_node=False)
    dense: bool = flax.struct.field(pytree_node=False)

    @property
    def position(self) -> Array:
        """[T] absolute positions."""
        return self.start[self.row] + self.offset

    def pad(self, x: Array) -> Array:
        """``[T, ...]`` to ``[R, W, ...]``; what stands past a row's count is garbage."""
        if self.dense:
            return x.reshape(self.start.shape[0], self.width, *x.shape[1:])
        return x[self.index]

    def flatten(self, x: Array) -> Array:
        """``[R, W, ...]`` to ``[T, ...]``."""
        if self.dense:
            return x.reshape(-1, *x.shape[2:])
        return x[self.row, self.offset]


def dense_layout(start: Array, count: Array, width: int, first_slot: Array | int = 0) -> Layout:
    """Every row takes W places, T = R * W (prefill, and steps of static width)."""
    rows = start.shape[0]
    flat = jnp.arange(rows * width, dtype=jnp.int32)
    return Layout(
        first_slot=jnp.asarray(first_slot, jnp.int32),
        start=start.astype(jnp.int32),
        count=count.astype(jnp.int32),
        row=flat // width,
        offset=flat % width,
        index=flat.reshape(rows, width),
        width=width,
        dense=True,
    )


def ragged_layout(start: Array, count: Array, width: int, tokens: int, first_slot: Array | int = 0) -> Layout:
    """Rows of different lengths packed one behind the other into ``tokens`` places.

    The caller guarantees ``sum(count) <= tokens``; what is left over is padding, which belongs to the last row's
    cells only in name: it is neither written to a cache nor read back.
    """
    rows = start.shape[0]
    if tokens == rows * width:
        return dense_layout(start, count, width, first_slot)
    end = jnp.cumsum(count)
    first = end - count
    flat = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(flat[:, None] >= end[None, :], axis=1, dtype=jnp.int32), rows - 1)
    offset = jnp.clip(flat - first[row], 0, width - 1)
    index = jnp.clip(first[:, None] + jnp.arange(width)[None, :], 0, tokens - 1)
    return Layout(
        first_slot=jnp.asarray(first_slot, jnp.int32),
        start=start.astype(jnp.int32),
        count=count.astype(jnp.int32),
        row=row,
        offset=offset.astype(jnp.int32),
        index=index.astype(jnp.int32),
        width=width,
        dense=False,
    )
