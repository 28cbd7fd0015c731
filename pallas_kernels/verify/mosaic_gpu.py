"""Row statistics as a Mosaic GPU kernel (Hopper): a program takes one tile of 64 rows, five numbers a row leave it.

The logits are read once; a second, tiny stage in XLA joins the tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.tiles import FAR, LOW, log_sum_exp, of_best_tile, padded
from pallas_kernels.verify.spec import Rows, RowStatistics

TILE = 128
CHUNK = 64
ROWS = 64


def refuses(rows: Rows) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if rows.logits.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the logits are {rows.logits.dtype}, the kernel reads bfloat16 and float32"
    return None


def row_statistics(rows: Rows, interpret: Any = None) -> RowStatistics:
    """See ``reference.row_statistics``. Logits whose sides are no multiples of 64 and 128 are padded, which copies
    them: make them so where they come from."""
    count, vocab = rows.logits.shape
    logits = padded(padded(rows.logits, 0, ROWS), 1, TILE)
    side = [padded(x, 0, ROWS) for x in (rows.inverse, rows.noisy, rows.word0, rows.word1, rows.token)]
    call = _call(logits.shape, logits.dtype, vocab, interpret)
    best, column, top, total, at_token = call(logits, *side)
    (choice,) = of_best_tile(best, column)
    lse = log_sum_exp(top, total)
    return RowStatistics(choice[:count], lse[:count], (jnp.max(at_token, axis=0) - lse)[:count])


@functools.cache
def _call(shape: tuple[int, ...], dtype: Any, vocab: int, interpret: Any) -> Callable[..., list[Any]]:
    """The kernel for ``logits [Tp, Vp]``: one row of ``Tp`` numbers a tile, five times."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    count, width = shape
    tiles = width // TILE
    ragged = vocab != width
    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32
    lanes = 128 // jnp.dtype(dtype).itemsize
    swizzled = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))

    def body(
        x_g: Any, inv_g: Any, noisy_g: Any, w0_g: Any, w1_g: Any, token_g: Any,
        best_g: Any, column_g: Any, top_g: Any, total_g: Any, found_g: Any,
        x_s: Any, inv_s: Any, noisy_s: Any, w0_s: Any, w1_s: Any, token_s: Any,
        best_s: Any, column_s: Any, top_s: Any, total_s: Any, found_s: Any, ready: Any,
    ) -> None:  # fmt: skip
        j, i = lax.axis_index("tiles"), lax.axis_index("rows")
        mine = pl.ds(i * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(x_g.at[mine, pl.ds(j * TILE, TILE)], x_s, ready)
        for source, place in ((inv_g, inv_s), (noisy_g, noisy_s), (w0_g, w0_s), (w1_g, w1_s), (token_g, token_s)):
            plgpu.copy_gmem_to_smem(source.at[mine], place, ready)
        plgpu.barrier_wait(ready)
        wide = (ROWS, CHUNK)

        def of_rows(x: Any) -> Any:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, wide, [0]), plgpu.Layout.WGMMA)

        def chunk(c: int) -> tuple[Any, ...]:
            at = plgpu.layout_cast(lax.broadcasted_iota(i32, wide, 1), plgpu.Layout.WGMMA) + (j * TILE + c * CHUNK)
            x = x_s[:, c * CHUNK : (c + 1) * CHUNK].astype(f32) * of_rows(inv_s[...])
            x = jnp.maximum(x, f32(LOW))
            if ragged:
                x = jnp.where(at < vocab, x, f32(LOW))
            top = jnp.max(x, axis=1)
            total = jnp.sum(jnp.exp(x - of_rows(top)), axis=1)
            found = jnp.max(jnp.where(at == of_rows(token_s[...]), x, f32(LOW)), axis=1)
            noisy = x + noise.gumbel(noise.bits(of_rows(w0_s[...]), of_rows(w1_s[...]), at)) * of_rows(noisy_s[...])
            best = jnp.max(noisy, axis=1)
            column = jnp.min(jnp.where(noisy == of_rows(best), at, i32(FAR)), axis=1)
            return best, column, top, total, found

        best, column, top, total, found = chunk(0)
        for c in range(1, TILE // CHUNK):
            best_c, column_c, top_c, total_c, found_c = chunk(c)
            column = jnp.where(best_c > best, column_c, column)
            best = jnp.maximum(best, best_c)
            high = jnp.maximum(top, top_c)
            total = total * jnp.exp(top - high) + total_c * jnp.exp(top_c - high)
            top, found = high, jnp.maximum(found, found_c)
        best_s[...], column_s[...], top_s[...], total_s[...], found_s[...] = best, column, top, total, found
        plgpu.commit_smem()
        out = ((best_s, best_g), (column_s, column_g), (top_s, top_g), (total_s, total_g), (found_s, found_g))
        for place, target in out:
            plgpu.copy_smem_to_gmem(place, target.at[j, mine])
        plgpu.wait_smem_to_gmem(0)

    types = (f32, i32, f32, f32, f32)
    row = functools.partial(plgpu.SMEM, (ROWS,))
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((tiles, count), t) for t in types],
        scratch_types=[
            plgpu.SMEM((ROWS, TILE), dtype, transforms=swizzled),
            *[row(t) for t in (f32, f32, u32, u32, i32)],
            *[row(t) for t in types],
            plgpu.Barrier(num_arrivals=6),
        ],
        grid=(tiles, count // ROWS),
        grid_names=("tiles", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
