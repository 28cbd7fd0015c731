"""Row statistics as a Triton kernel, through jax-triton: NVIDIA cards from Ampere on.

The logits are read once, five numbers a row leave each tile; a second, tiny stage in XLA joins the tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import log_sum_exp, of_best_tile
from pallas_kernels.triton_call import call, missing
from pallas_kernels.verify.spec import Rows, RowStatistics

TILE = 1024
ROWS = 2
WARPS = 4


def refuses(rows: Rows, interpret: Any = None) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if rows.logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the logits are {rows.logits.dtype}, the kernel reads bfloat16, float16 and float32"
    return missing() if interpret is None else None


def row_statistics(rows: Rows, interpret: Any = None) -> RowStatistics:
    """See ``reference.row_statistics``."""
    from pallas_kernels.verify.triton_kernel import rows_tile

    count, vocab = rows.logits.shape
    tiles = -(-vocab // TILE)
    types = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)
    best, column, top, total, found = call(
        rows_tile,
        (rows.logits, rows.inverse, rows.noisy, rows.word0, rows.word1, rows.token),
        [jax.ShapeDtypeStruct((tiles, count), t) for t in types],
        grid=(-(-count // ROWS), tiles),
        warps=WARPS,
        interpret=interpret,
        COUNT=count, VOCAB=vocab, ROWS=ROWS, TILE=TILE,
    )  # fmt: skip
    (choice,) = of_best_tile(best, column)
    lse = log_sum_exp(top, total)
    return RowStatistics(choice, lse, jnp.max(found, axis=0) - lse)
