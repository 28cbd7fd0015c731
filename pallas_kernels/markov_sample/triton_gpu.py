"""One place of the head as a Triton kernel, through jax-triton: NVIDIA cards from Ampere on.

As on Hopper every program takes one tile of the vocabulary, five numbers a row leave it, and a tiny second stage in XLA
picks the winner. Loads are masked, so no vocabulary, rank or number of rows is padded or copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.markov_sample.spec import Array, Block, Head
from pallas_kernels.tiles import log_sum_exp, of_best_tile
from pallas_kernels.triton_call import call, missing

TILE = 128
DEPTH = 64
WARPS = 8


def row_block(rows: int) -> int:
    """Rows of a program: tensor cores take 16 at least, and 128 would spill registers."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def refuses(head: Head, block: Block, interpret: Any = None) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if head.w2 is None:
        return "there is no Markov head (plain sampling of the base logits is not this kernel's work)"
    if head.w2.dtype != jnp.bfloat16:
        return f"W2 is {head.w2.dtype}, the tensor cores take bfloat16 here"
    return missing() if interpret is None else None


def make_step(head: Head, block: Block, interpret: Any = None) -> Callable[..., tuple[Array, Array, Array]]:
    """``step(k, z [B, r], inverse [B], greedy [B]) -> (index, log_q, lse)``, each ``[B]``."""
    from pallas_kernels.markov_sample.triton_kernel import markov_tile

    _, rows, vocab = block.base.shape
    w2 = head.w2
    assert w2 is not None  # refuses() is the check
    size, tiles = row_block(rows), -(-vocab // TILE)
    ids = jnp.zeros(1, jnp.int32) if block.ids is None else block.ids
    types = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)
    words = block.word0, block.word1
    out = [jax.ShapeDtypeStruct((tiles, rows), t) for t in types]

    def step(k: Array, z: Array, inverse: Array, greedy: Array) -> tuple[Array, Array, Array]:
        noisy = jnp.where(greedy, 0.0, 1.0).astype(jnp.float32)
        best, column, chosen, top, total = call(
            markov_tile,
            (k[None].astype(jnp.int32), z.astype(w2.dtype), w2, block.base, ids, inverse, noisy, *words),
            out,
            grid=(-(-rows // size), tiles),  # rows run faster than tiles, so that W2 is read from memory once
            warps=WARPS,
            interpret=interpret,
            COUNT=rows, VOCAB=vocab, RANK=w2.shape[1], TRIMMED=block.ids is not None,
            ROWS=size, TILE=TILE, DEPTH=DEPTH,
        )  # fmt: skip
        index, value = of_best_tile(best, column, chosen)
        lse = log_sum_exp(top, total)
        return index, jnp.where(greedy, 0.0, value - lse), lse

    return step
