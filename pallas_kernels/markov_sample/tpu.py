"""One place of the head as a Pallas TPU kernel.

The grid walks the vocabulary in tiles, in order on one core; the statistics of the rows (best noisy logit and its
column, maximum, sum of exponentials) stay in VMEM from tile to tile. W2 and the base logits are read once, nothing of
width V is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import noise
from pallas_kernels.markov_sample.spec import Array, Block, Head
from pallas_kernels.tiles import FAR, LOW

TILE = 512


def refuses(head: Head, block: Block) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if head.w2 is None:
        return "there is no Markov head (plain sampling of the base logits is not this kernel's work)"
    if head.w2.shape[1] % 128:
        return f"the Markov rank is {head.w2.shape[1]}, the lanes of a TPU need a multiple of 128"
    if block.base.shape[1] % 8:
        return f"there are {block.base.shape[1]} rows, the sublanes of a TPU need a multiple of 8"
    return None


def _kernel(
    place: Any, z: Any, w2: Any, base: Any, ids: Any, row: Any, words: Any, best: Any, column: Any, chosen: Any,
    top: Any, total: Any, *, vocab: int,
) -> None:  # fmt: skip
    """``row [B, 2]``: 1 / temperature and 1 where noise is wanted. ``words [1, B, 2]``."""
    del place
    tile = pl.program_id(0)
    x = jax.lax.dot_general(z[...], w2[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    x = (x + base[0].astype(jnp.float32)) * row[:, 0:1]
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) + tile * TILE
    inside = at < vocab
    x = jnp.where(inside, jnp.maximum(x, LOW), LOW)  # a masked column (-inf) counts as LOW
    g = noise.gumbel(noise.bits(words[0, :, 0:1], words[0, :, 1:2], jnp.broadcast_to(ids[...], x.shape)))
    noisy = jnp.where(inside & (row[:, 1:2] > 0), x + g, x)
    here = jnp.max(noisy, axis=1, keepdims=True)
    where = jnp.min(jnp.where(noisy == here, at, FAR), axis=1, keepdims=True)
    value = jnp.max(jnp.where(at == where, x, LOW), axis=1, keepdims=True)
    high = jnp.max(x, axis=1, keepdims=True)

    @pl.when(tile == 0)
    def _start() -> None:
        best[...] = jnp.full(best.shape, LOW, jnp.float32)
        column[...] = jnp.zeros(column.shape, jnp.int32)
        chosen[...] = jnp.zeros(chosen.shape, jnp.float32)
        top[...] = jnp.full(top.shape, LOW, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)

    better = here > best[...]  # a tie stays with the earlier tile: the first arg-max
    column[...] = jnp.where(better, where, column[...])
    chosen[...] = jnp.where(better, value, chosen[...])
    best[...] = jnp.where(better, here, best[...])
    new = jnp.maximum(top[...], high)
    mass = jnp.sum(jnp.where(inside, jnp.exp(x - new), 0.0), axis=1, keepdims=True)
    total[...] = total[...] * jnp.exp(top[...] - new) + mass
    top[...] = new


def make_step(head: Head, block: Block, interpret: Any = None) -> Callable[..., tuple[Array, Array, Array]]:
    """``step(k, z [B, r], inverse [B], greedy [B]) -> (index, log_q, lse)``, each ``[B]``."""
    places, rows, vocab = block.base.shape
    w2 = head.w2
    assert w2 is not None  # refuses() is the check
    rank = w2.shape[1]
    ids = (jnp.arange(vocab, dtype=jnp.int32) if block.ids is None else block.ids)[None, :]
    words = jnp.stack([block.word0, block.word1], axis=-1)  # [G, B, 2]
    column = partial(jax.ShapeDtypeStruct, (rows, 1))
    tiles = pl.cdiv(vocab, TILE)
    whole = pl.BlockSpec((rows, 1), lambda j, k: (0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((rows, rank), lambda j, k: (0, 0)),
            pl.BlockSpec((TILE, rank), lambda j, k: (j, 0)),
            pl.BlockSpec((1, rows, TILE), lambda j, k: (k[0], 0, j)),
            pl.BlockSpec((1, TILE), lambda j, k: (0, j)),
            pl.BlockSpec((rows, 2), lambda j, k: (0, 0)),
            pl.BlockSpec((1, rows, 2), lambda j, k: (k[0], 0, 0)),
        ],
        out_specs=[whole] * 5,
    )
    call = pl.pallas_call(
        partial(_kernel, vocab=vocab),
        grid_spec=grid,
        out_shape=[
            column(jnp.float32),
            column(jnp.int32),
            column(jnp.float32),
            column(jnp.float32),
            column(jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=False if interpret is None else interpret,
        name="markov_sample",
    )

    def step(k: Array, z: Array, inverse: Array, greedy: Array) -> tuple[Array, Array, Array]:
        row = jnp.stack([inverse, jnp.where(greedy, 0.0, 1.0)], axis=1).astype(jnp.float32)
        _, index, chosen, top, total = call(k[None].astype(jnp.int32), z, w2, block.base, ids, row, words)
        lse = (top + jnp.log(total))[:, 0]
        return index[:, 0], jnp.where(greedy, 0.0, chosen[:, 0] - lse), lse

    return step
