"""Row statistics as a Pallas TPU kernel: a block of rows walks the vocabulary, its statistics stay in VMEM."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import noise
from pallas_kernels.tiles import FAR, LOW
from pallas_kernels.verify.spec import Rows, RowStatistics

TILE = 2048
ROWS = 8


def refuses(rows: Rows) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if rows.logits.shape[0] % ROWS:
        return f"there are {rows.logits.shape[0]} rows, the sublanes of a TPU need a multiple of {ROWS}"
    return None


def _kernel(
    logits: Any, scale: Any, words: Any, token: Any, best: Any, choice: Any, top: Any, total: Any, at_token: Any, *,
    vocab: int,
) -> None:  # fmt: skip
    """``scale [rows, 2]``: 1 / temperature and 1 where noise is wanted."""
    tile = pl.program_id(1)
    at = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) + tile * TILE
    inside = at < vocab
    x = jnp.where(inside, jnp.maximum(logits[...].astype(jnp.float32) * scale[:, 0:1], LOW), LOW)
    noisy = x + noise.gumbel(noise.bits(words[:, 0:1], words[:, 1:2], at)) * scale[:, 1:2]
    here = jnp.max(noisy, axis=1, keepdims=True)
    where = jnp.min(jnp.where(noisy == here, at, FAR), axis=1, keepdims=True)
    high = jnp.max(x, axis=1, keepdims=True)

    @pl.when(tile == 0)
    def _start() -> None:
        best[...] = jnp.full(best.shape, -jnp.inf, jnp.float32)
        choice[...] = jnp.zeros(choice.shape, jnp.int32)
        top[...] = jnp.full(top.shape, LOW, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        at_token[...] = jnp.full(at_token.shape, LOW, jnp.float32)

    better = here > best[...]  # a tie stays with the earlier tile: the first arg-max
    choice[...] = jnp.where(better, where, choice[...])
    best[...] = jnp.where(better, here, best[...])
    new = jnp.maximum(top[...], high)
    mass = jnp.sum(jnp.where(inside, jnp.exp(x - new), 0.0), axis=1, keepdims=True)
    total[...] = total[...] * jnp.exp(top[...] - new) + mass
    top[...] = new
    found = jnp.max(jnp.where(at == token[...], x, LOW), axis=1, keepdims=True)
    at_token[...] = jnp.maximum(at_token[...], found)


def row_statistics(rows: Rows, interpret: Any = None) -> RowStatistics:
    """See ``reference.row_statistics``."""
    count, vocab = rows.logits.shape
    scale = jnp.stack([rows.inverse, rows.noisy], axis=1)
    words = jnp.stack([rows.word0, rows.word1], axis=1)
    one = pl.BlockSpec((ROWS, 1), lambda i, j: (i, 0))
    two = pl.BlockSpec((ROWS, 2), lambda i, j: (i, 0))
    column = partial(jax.ShapeDtypeStruct, (count, 1))
    f32 = jnp.float32
    _, choice, top, total, at_token = pl.pallas_call(
        partial(_kernel, vocab=vocab),
        grid=(count // ROWS, pl.cdiv(vocab, TILE)),
        in_specs=[pl.BlockSpec((ROWS, TILE), lambda i, j: (i, j)), two, two, one],
        out_specs=[one] * 5,
        out_shape=[column(f32), column(jnp.int32), column(f32), column(f32), column(f32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=False if interpret is None else interpret,
        name="verify_rows",
    )(rows.logits, scale, words, rows.token[:, None])
    lse = (top + jnp.log(total))[:, 0]
    return RowStatistics(choice[:, 0], lse, at_token[:, 0] - lse)
