"""One place of the head as a Mosaic GPU kernel (Hopper: TMA copies and wgmma).

Every program takes one tile of the vocabulary for 64 rows: W2's tile arrives by TMA while the rows' z do, the product
stays in registers, base logits, temperature and noise are added there, and four numbers and a column a row leave. A
second, tiny stage in XLA picks the winner among the tiles. W2 and the base logits are read once a place and nothing of
width V is written. The place is read inside the kernel: slicing the base logits outside would copy them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.markov_sample.spec import Array, Block, Head
from pallas_kernels.tiles import FAR, LOW, log_sum_exp, of_best_tile, padded

TILE = 128
CHUNK = 64
ROWS = 64
_SHARED_BYTES = 232448


def refuses(head: Head, block: Block) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    if head.w2 is None:
        return "there is no Markov head (plain sampling of the base logits is not this kernel's work)"
    if head.w2.dtype != jnp.bfloat16:
        return f"W2 is {head.w2.dtype}, the tensor cores take bfloat16 here"
    rank = head.w2.shape[1]
    if rank % 64:
        return f"the Markov rank is {rank}, a swizzled tile needs a multiple of 64"
    shared = 2 * (TILE + ROWS) * rank + block.base.dtype.itemsize * ROWS * TILE + 8192
    if shared > _SHARED_BYTES:
        return f"the Markov rank {rank} needs {shared} bytes of shared memory, a program has {_SHARED_BYTES}"
    return None


def make_step(head: Head, block: Block, interpret: Any = None) -> Callable[..., tuple[Array, Array, Array]]:
    """``step(k, z [B, r], inverse [B], greedy [B]) -> (index, log_q, lse)``, each ``[B]``.

    A vocabulary that is no multiple of the tile, or rows that are none of 64, are padded: then base and W2 are copied
    once a block. Pad them where they are made and there is nothing to copy.
    """
    _, rows, vocab = block.base.shape
    assert head.w2 is not None  # refuses() is the check
    w2 = padded(head.w2, 0, TILE)
    base = padded(padded(block.base, 2, TILE), 1, ROWS)
    ids = padded(jnp.arange(vocab, dtype=jnp.int32) if block.ids is None else block.ids, 0, TILE)
    word0, word1 = padded(block.word0, 1, ROWS), padded(block.word1, 1, ROWS)
    call = _call(w2.shape[1], base.shape, base.dtype, vocab, interpret)

    def step(k: Array, z: Array, inverse: Array, greedy: Array) -> tuple[Array, Array, Array]:
        noisy = jnp.where(greedy, 0.0, 1.0).astype(jnp.float32)
        best, column, chosen, top, total = call(
            k[None].astype(jnp.int32), padded(z.astype(jnp.bfloat16), 0, ROWS), w2, base, ids,
            padded(inverse, 0, ROWS), padded(noisy, 0, ROWS), word0[k], word1[k],
        )  # fmt: skip
        index, value = (x[:rows] for x in of_best_tile(best, column, chosen))
        lse = log_sum_exp(top, total)[:rows]
        return index, jnp.where(greedy, 0.0, value - lse), lse

    return step


@functools.cache
def _call(rank: int, shape: tuple[int, ...], dtype: Any, vocab: int, interpret: Any) -> Callable[..., list[Array]]:
    """The kernel for ``base [G, Bp, Vp]``: one row of ``Bp`` numbers a tile, five times."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, rows, width = shape
    tiles = width // TILE
    ragged = vocab != width
    lanes = 128 // jnp.dtype(dtype).itemsize
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    base_swizzled = (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))
    f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32

    def body(
        k_g: Any, z_g: Any, w_g: Any, u_g: Any, ids_g: Any, inv_g: Any, noisy_g: Any, w0_g: Any, w1_g: Any,
        best_g: Any, column_g: Any, chosen_g: Any, top_g: Any, total_g: Any,
        z_s: Any, w_s: Any, u_s: Any, ids_s: Any, inv_s: Any, noisy_s: Any, w0_s: Any, w1_s: Any,
        best_s: Any, column_s: Any, chosen_s: Any, top_s: Any, total_s: Any, product_ready: Any, rest_ready: Any,
    ) -> None:  # fmt: skip
        j, i = lax.axis_index("tiles"), lax.axis_index("rows")
        mine, cells = pl.ds(i * ROWS, ROWS), pl.ds(j * TILE, TILE)
        plgpu.copy_gmem_to_smem(z_g.at[mine], z_s, product_ready)
        plgpu.copy_gmem_to_smem(w_g.at[cells], w_s, product_ready)
        plgpu.copy_gmem_to_smem(u_g.at[k_g[0], mine, cells], u_s, rest_ready)
        plgpu.copy_gmem_to_smem(ids_g.at[cells], ids_s, rest_ready)
        for source, place in ((inv_g, inv_s), (noisy_g, noisy_s), (w0_g, w0_s), (w1_g, w1_s)):
            plgpu.copy_gmem_to_smem(source.at[mine], place, rest_ready)
        plgpu.barrier_wait(product_ready)

        def chunk(c: int, so_far: tuple[Any, ...] | None) -> tuple[Any, ...]:
            """Row statistics with the columns of one chunk: all of a tile at once would spill registers."""
            part = slice(c * CHUNK, (c + 1) * CHUNK)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, CHUNK), f32))
            def product(acc: Any) -> Any:
                plgpu.wgmma(acc, z_s, w_s.at[part].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            if c == 0:
                plgpu.barrier_wait(rest_ready)
            wide = (ROWS, CHUNK)

            def of_rows(x: Any) -> Any:
                return lax.broadcast_in_dim(x, wide, [0])

            at = lax.broadcasted_iota(i32, wide, 1) + (j * TILE + c * CHUNK)
            x = (product + u_s[:, part].astype(f32)) * of_rows(inv_s[...])
            # A masked column (-inf) or one past the vocabulary counts as LOW: neither noise nor sums notice it.
            x = jnp.maximum(x, f32(LOW))
            if ragged:
                x = jnp.where(at < vocab, x, f32(LOW))
            top = jnp.max(x, axis=1)
            total = jnp.sum(jnp.exp(x - of_rows(top)), axis=1)
            ids = lax.broadcast_in_dim(ids_s[part], wide, [1])
            g = noise.gumbel(noise.bits(of_rows(w0_s[...]), of_rows(w1_s[...]), ids))
            noisy = x + g * of_rows(noisy_s[...])
            best = jnp.max(noisy, axis=1)
            column = jnp.min(jnp.where(noisy == of_rows(best), at, i32(FAR)), axis=1)
            chosen = jnp.max(jnp.where(at == of_rows(column), x, f32(LOW)), axis=1)
            if so_far is None:
                return best, column, chosen, top, total
            old_best, old_column, old_chosen, old_top, old_total = so_far
            better = best > old_best
            high = jnp.maximum(top, old_top)
            return (
                jnp.maximum(best, old_best),
                jnp.where(better, column, old_column),
                jnp.where(better, chosen, old_chosen),
                high,
                old_total * jnp.exp(old_top - high) + total * jnp.exp(top - high),
            )

        statistics = None
        for c in range(TILE // CHUNK):
            statistics = chunk(c, statistics)
        for place, value in zip((best_s, column_s, chosen_s, top_s, total_s), statistics, strict=True):  # type: ignore[arg-type]
            place[...] = value
        plgpu.commit_smem()
        out = ((best_s, best_g), (column_s, column_g), (chosen_s, chosen_g), (top_s, top_g), (total_s, total_g))
        for place, target in out:
            plgpu.copy_smem_to_gmem(place, target.at[j, mine])
        plgpu.wait_smem_to_gmem(0)

    types = (f32, i32, f32, f32, f32)
    row = functools.partial(plgpu.SMEM, (ROWS,))
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((tiles, rows), t) for t in types],
        scratch_types=[
            plgpu.SMEM((ROWS, rank), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((TILE, rank), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((ROWS, TILE), dtype, transforms=base_swizzled),
            plgpu.SMEM((TILE,), i32), row(f32), row(f32), row(u32), row(u32),
            *[row(t) for t in types],
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=6),
        ],
        grid=(tiles, rows // ROWS),
        grid_names=("tiles", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
