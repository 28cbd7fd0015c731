"""Slot attention as a Mosaic GPU kernel (Hopper: TMA copies and wgmma).

A program takes 64 rows (tokens times the query heads of one key/value head) of one request and one part of its cells:
key and value tiles of 64 cells arrive by TMA, two in flight, and go through the online softmax; a draft block's own
keys are one more tile behind them. It walks only the tiles that its rows see. The parts of a request are joined in XLA
by their log-sum-exps: that is the split over cells for long contexts and few requests. The layer and the slot are read
inside, so that no cache is sliced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.slot_attention.spec import Array, Cells, Own, Tokens
from pallas_kernels.tiles import padded

TILE = 64  # cells of a step
ROWS = 64
MASKED = -1e30
_PROGRAMS = 264
"""Enough to fill the 132 multiprocessors of an H100 twice."""


def refuses(q: Array, tokens: Tokens, cells: Cells, own: Own | None) -> str | None:
    """Why the kernel cannot run on these arguments; None if it can."""
    size, length = cells.k.shape[-1], cells.k.shape[-2]
    types = {x.dtype for x in (q, cells.k, cells.v, *(() if own is None else own))}
    if types != {jnp.dtype(jnp.bfloat16)}:
        return f"queries, keys and values are {', '.join(sorted(map(str, types)))}, the tensor cores take bfloat16 here"
    if size not in (64, 128):
        return f"heads have size {size}, the kernel is written for 64 and 128"
    if length % TILE:
        return f"slots have {length} cells, a tile takes {TILE}: make them a multiple"
    if own is not None and tokens.index.shape[1] > TILE:
        return f"a block has {tokens.index.shape[1]} tokens, its own keys must fit in one tile of {TILE}"
    return None


def parts_for(programs: int, context: int) -> int:
    """Into how many parts the cells of a request are split: enough programs, and 256 cells or more a part."""
    return max(1, min(-(-_PROGRAMS // programs), context // 256))


def slot_attention(
    q: Array,
    tokens: Tokens,
    cells: Cells,
    own: Own | None,
    *,
    scale: float,
    window: int,
    context: int,
    interpret: Any = None,
    parts: int | None = None,
) -> Array:
    """See ``api.slot_attention``. ``parts``: None chooses (``parts_for``)."""
    rows, width = tokens.index.shape
    heads, size, kv_heads = q.shape[1], q.shape[2], cells.k.shape[2]
    group = heads // kv_heads
    grouped = q[tokens.index].reshape(rows, width, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    grouped = padded(grouped.reshape(rows, kv_heads, width * group, size), 2, ROWS)
    tiles = grouped.shape[2] // ROWS
    if parts is None:
        parts = parts_for(rows * kv_heads * tiles, context)
    mine = []
    if own is not None:
        mine = [padded(x[tokens.index].swapaxes(1, 2), 2, TILE) for x in own]
    shapes = (grouped.shape, cells.k.shape, parts, -(-context // TILE))
    call = _call(*shapes, q.dtype, group, window, scale, own is not None, interpret)
    out, lse = call(
        cells.layer[None].astype(jnp.int32), tokens.slot, tokens.start, tokens.count, grouped, cells.k, cells.v, *mine
    )
    if parts > 1:
        weight = jax.nn.softmax(lse, axis=0)[..., None]
        out = jnp.sum(out * weight, axis=0)
    else:
        out = out[0]
    out = out[:, :, : width * group].reshape(rows, kv_heads, width, group, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, width, heads, size)[tokens.row, tokens.offset].astype(q.dtype)


@functools.cache
def _call(
    shape: tuple[int, ...],
    cells: tuple[int, ...],
    parts: int,
    most: int,
    dtype: Any,
    group: int,
    window: int,
    scale: float,
    own: bool,
    interpret: Any,
) -> Callable[..., list[Array]]:
    """The kernel for ``q [R, Hk, M, D]`` and caches of shape ``cells``, of which the first ``most`` tiles are read."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    requests, kv_heads, count, size = shape
    tiles = count // ROWS
    share = -(-most // parts)  # tiles of a part
    f32, i32 = jnp.float32, jnp.int32
    out_type = f32 if parts > 1 else dtype
    swizzle = plgpu.SwizzleTransform(128)
    halves = (plgpu.TilingTransform((8, 64)), swizzle)
    out_tiling = (plgpu.TilingTransform((8, 128 // jnp.dtype(out_type).itemsize)), swizzle)

    def body(layer_g: Any, slot_g: Any, start_g: Any, count_g: Any, q_g: Any, k_g: Any, v_g: Any, *rest: Any) -> None:
        own_k, own_v = rest[:2] if own else (None, None)
        out_g, lse_g, q_s, k_s, v_s, p_s, out_s, lse_s, q_ready, k_ready, v_ready = rest[2 if own else 0 :]
        r, h, place = lax.axis_index("request"), lax.axis_index("head"), lax.axis_index("place")
        part, tile = lax.div(place, i32(tiles)), lax.rem(place, i32(tiles))
        layer, slot, start, tokens = layer_g[0], slot_g[r], start_g[r], count_g[r]
        first_row = tile * ROWS
        # Positions that the first and the last token of these rows may see, and the tiles they lie in.
        first = start + lax.div(first_row, i32(group))
        last = start - 1 if own else start + jnp.minimum(lax.div(first_row + (ROWS - 1), i32(group)), tokens - 1)
        works = (first < start + tokens).astype(i32)
        begin = part * share
        if window:
            begin = jnp.maximum(begin, lax.div(jnp.maximum(first - (window - 1), 0), i32(TILE)))
        end = jnp.minimum(jnp.minimum((part + 1) * share, i32(most)), lax.div(last + TILE, i32(TILE)))
        steps = jnp.maximum(end - begin, 0) * works
        total = steps + works * (part == 0).astype(i32) if own else steps

        plgpu.copy_gmem_to_smem(q_g.at[r, h, pl.ds(first_row, ROWS)], q_s, q_ready)

        def fetch(i: Any) -> None:
            stage = lax.rem(i, i32(2))

            @pl.when(i < steps)
            def _cells() -> None:
                at = pl.ds((begin + i) * TILE, TILE)
                plgpu.copy_gmem_to_smem(k_g.at[layer, slot, h, at], k_s.at[stage], k_ready.at[stage])
                plgpu.copy_gmem_to_smem(v_g.at[layer, slot, h, at], v_s.at[stage], v_ready.at[stage])

            if own:

                @pl.when((i == steps) & (i < total))
                def _own() -> None:
                    plgpu.copy_gmem_to_smem(own_k.at[r, h], k_s.at[stage], k_ready.at[stage])
                    plgpu.copy_gmem_to_smem(own_v.at[r, h], v_s.at[stage], v_ready.at[stage])

        fetch(i32(0))
        plgpu.barrier_wait(q_ready)
        wide = (ROWS, TILE)
        query = start + lax.div(lax.broadcasted_iota(i32, wide, 0) + first_row, i32(group))
        column = lax.broadcasted_iota(i32, wide, 1)

        def of_rows(x: Any, shape: tuple[int, int] = wide) -> Any:
            return lax.broadcast_in_dim(x, shape, [0])

        def step(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            acc, top, mass = carry
            stage = lax.rem(i, i32(2))
            fetch(i + 1)
            plgpu.barrier_wait(k_ready.at[stage])

            def product(a: Any) -> Any:
                plgpu.wgmma(a, q_s, k_s.at[stage].transpose((1, 0)))
                return a[...]

            s = pl.run_scoped(product, plgpu.ACC(wide, f32)) * f32(scale)
            if own:
                behind = i == steps  # the block itself
                position = column + jnp.where(behind, start, (begin + i) * TILE)
                seen = position <= jnp.where(behind, start + tokens - 1, start - 1)
            else:
                position = column + (begin + i) * TILE
                seen = position <= query
            if window:
                seen = seen & (position > query - window)
            s = jnp.where(seen, s, f32(MASKED))
            high = jnp.maximum(top, jnp.max(s, axis=1))
            fade = jnp.exp(top - high)
            p = jnp.exp(s - of_rows(high))
            mass = mass * fade + jnp.sum(p, axis=1)
            acc = acc * of_rows(fade, (ROWS, size))
            p_s[...] = p.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_ready.at[stage])

            def mix(a: Any) -> Any:
                plgpu.wgmma(a, p_s, v_s.at[stage])
                return a[...]

            return acc + pl.run_scoped(mix, plgpu.ACC((ROWS, size), f32)), high, mass

        nothing = (jnp.zeros((ROWS, size), f32), jnp.full((ROWS,), MASKED, f32), jnp.zeros((ROWS,), f32))
        acc, top, mass = lax.fori_loop(0, total, step, nothing)
        mass = jnp.maximum(mass, f32(1e-30))
        out_s[...] = (acc / of_rows(mass, (ROWS, size))).astype(out_type)
        lse_s[...] = top + jnp.log(mass)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g.at[part, r, h, pl.ds(first_row, ROWS)])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[part, r, h, pl.ds(first_row, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    stages = plgpu.SMEM((2, TILE, size), dtype, transforms=halves)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((parts, *shape), out_type),
            jax.ShapeDtypeStruct((parts, requests, kv_heads, count), f32),
        ],
        scratch_types=[
            plgpu.SMEM((ROWS, size), dtype, transforms=halves),
            stages,
            stages,
            plgpu.SMEM((ROWS, TILE), dtype, transforms=halves),
            plgpu.SMEM((ROWS, size), out_type, transforms=out_tiling),
            plgpu.SMEM((ROWS,), f32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(requests, kv_heads, parts * tiles),
        grid_names=("request", "head", "place"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )
