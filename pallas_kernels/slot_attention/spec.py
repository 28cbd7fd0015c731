"""What goes into slot attention; shared by backends, tests and benchmarks.

Shapes: T flat tokens, R requests of up to W tokens each, N layers, S slots of L cells, H query heads, Hk key/value
heads, D head size. A request's tokens stand at positions ``start .. start + count - 1``, cell c holds position c.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Tokens(NamedTuple):
    """Which request each flat token belongs to, and where."""

    row: Array  # [T] int32 request
    offset: Array  # [T] int32 place in the request's block
    # index and count shadow the tuple's own methods
    index: Array  # type: ignore[assignment]  # [R, W] int32 flat token of each place; past count they point anywhere
    start: Array  # [R] int32 position of the first token
    count: Array  # type: ignore[assignment]  # [R] int32 tokens, 0 for a request that takes no part
    slot: Array  # [R] int32


class Cells(NamedTuple):
    """The caches of all layers, and the layer that is read. A slice of one layer would copy it.

    Values are finite, in garbage cells too; keys of cells that nobody sees may be NaN.
    """

    k: Array  # [N, S, Hk, L, D]
    v: Array  # [N, S, Hk, L, D]
    layer: Array  # [] int32


class Own(NamedTuple):
    """Keys and values of the block itself, where they are in no cache (a draft block)."""

    k: Array  # [T, Hk, D]
    v: Array  # [T, Hk, D]


def visible(tokens: Tokens, context: int, window: int, own: bool) -> tuple[Array, Array | None]:
    """``[R, W, context]`` cells and, with ``own``, ``[R, W, W]`` places that each token sees.

    Without ``own`` a token sees the cells up to its own position (they hold the block already). With it, all cells
    before the block and the whole block, in both directions. A window of n > 0: the n positions that end at the token's
    own (of a block's later ones all).
    """
    width = tokens.index.shape[1]
    query = tokens.start[:, None] + jnp.arange(width)[None, :]  # [R, W]
    cell, place = jnp.arange(context)[None, None, :], jnp.arange(width)[None, None, :]
    last = jnp.broadcast_to(tokens.start[:, None] - 1, query.shape) if own else query
    cells = cell <= last[:, :, None]
    block = jnp.broadcast_to(place < tokens.count[:, None, None], (*query.shape, width)) if own else None
    if window:
        cells &= cell > query[:, :, None] - window
        if block is not None:
            block &= place > jnp.arange(width)[None, :, None] - window
    return cells, block
