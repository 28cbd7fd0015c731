"""Attention of flat tokens against slot caches: the reference by the library's own, every backend by the reference."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layout import Layout, dense_layout, ragged_layout
from dspark_jax.nn.attention import KeyBlock, attention, block_visible, causal_visible, context_visible
from pallas_kernels.dispatch import BackendError
from pallas_kernels.slot_attention import Cells, Own, Tokens, slot_attention, tpu
from pallas_kernels.slot_attention.mosaic_gpu import parts_for
from pallas_kernels.slot_attention.mosaic_gpu import slot_attention as hopper
from tests.kernels import interpreters

LAYERS, SLOTS, CELLS = 2, 4, 192
FIRST = 1  # slot of request 0


def tokens_of(layout: Layout) -> Tokens:
    slot = layout.first_slot + jnp.arange(layout.start.shape[0], dtype=jnp.int32)
    return Tokens(layout.row, layout.offset, layout.index, layout.start, layout.count, slot)


def case(
    *, dense: bool = False, heads: int = 4, size: int = 64, width: int = 3, dtype: Any = jnp.bfloat16
) -> tuple[jax.Array, Layout, Cells, Own]:
    """Three requests in slots 1 to 3: one in the first tile, one that takes no part, one in the last tile. Keys behind
    a request are NaN, as those of a broken former tenant would be; values are finite everywhere."""
    start, count = jnp.array([5, 70, 150], jnp.int32), jnp.array([2, 0, width], jnp.int32)
    if dense:
        layout = dense_layout(start, count, width, FIRST)
    else:
        layout = ragged_layout(start, count, width, width + 3, FIRST)
    keys = iter(jax.random.split(jax.random.key(heads + width), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(dtype)

    flat, kv_heads = layout.row.shape[0], 2
    q = normal(flat, heads, size)
    k, v = (normal(LAYERS, SLOTS, kv_heads, CELLS, size) for _ in range(2))
    end = jnp.zeros(SLOTS, jnp.int32).at[FIRST:].set(start + width)
    behind = jnp.arange(CELLS)[None, :] >= end[:, None]
    k = jnp.where(behind[None, :, None, :, None], jnp.nan, k).astype(dtype)
    return q, layout, Cells(k, v, jnp.int32(1)), Own(normal(flat, kv_heads, size), normal(flat, kv_heads, size))


def real(layout: Layout) -> np.ndarray:
    """Flat tokens that belong to a request."""
    found = [int(layout.index[r, w]) for r in range(3) for w in range(int(layout.count[r]))]
    assert len(set(found)) == int(layout.count.sum())
    return np.array(found)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("own", [False, True])
def test_reference_is_the_librarys_attention(own: bool, window: int) -> None:
    """Causal over the cells, and the draft block's: context and block share one softmax. float32, to 1e-5."""
    q, layout, cells, block = case(dense=own, dtype=jnp.float32)
    got = slot_attention(
        q, tokens_of(layout), cells, block if own else None, scale=0.125, window=window, implementation="xla"
    )
    k, v = cells.k[1, FIRST:], cells.v[1, FIRST:]
    if own:
        seen = context_visible(layout.start, layout.width, CELLS, window)
        pad = [layout.pad(x).swapaxes(1, 2) for x in block]
        # Only whole blocks are drafted; the short row of this case sees garbage of its own and is left out below.
        blocks = [KeyBlock(k, v, seen), KeyBlock(*pad, block_visible(3, layout.width, window))]
        rows = np.asarray(layout.index[2])
    else:
        blocks = [KeyBlock(k, v, causal_visible(layout.start, layout.width, CELLS, window))]
        rows = real(layout)
    want = layout.flatten(attention(layout.pad(q), blocks, 0.125))
    np.testing.assert_allclose(np.asarray(got)[rows], np.asarray(want)[rows], atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN keys, multiplied by NumPy
@pytest.mark.parametrize(
    ("own", "window", "heads", "width", "parts"),
    [
        (False, 0, 4, 3, 2),
        pytest.param(True, 0, 4, 3, 1, marks=pytest.mark.slow),
        pytest.param(True, 40, 6, 3, 3, marks=pytest.mark.slow),  # 3 query heads a key head, a part for every tile
        pytest.param(False, 40, 4, 33, 2, marks=pytest.mark.slow),  # 66 rows: two tiles of them
    ],
)
def test_mosaic_gpu_kernel_equals_the_reference_in_the_interpreter(
    own: bool, window: int, heads: int, width: int, parts: int
) -> None:
    """Ragged requests, an idle one, NaN keys behind each; split over cells and joined. bfloat16 weights: to 2e-2."""
    interpret = interpreters.mosaic_gpu()
    q, layout, cells, block = case(heads=heads, width=width)
    arguments = (q, tokens_of(layout), cells, block if own else None)
    run = partial(hopper, scale=0.125, window=window, context=CELLS, interpret=interpret, parts=parts)
    got = np.asarray(jax.jit(run)(*arguments).astype(jnp.float32))
    interpreters.no_race_on_gpu()
    want = slot_attention(*arguments, scale=0.125, window=window, implementation="xla").astype(jnp.float32)
    np.testing.assert_allclose(got[real(layout)], np.asarray(want)[real(layout)], atol=2e-2)
    assert np.isfinite(got).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN keys, multiplied by NumPy
@pytest.mark.parametrize(("dense", "window"), [(False, 0), (False, 40), (True, 0)])
def test_what_jaxs_tpu_kernel_is_handed_is_this_attention(
    dense: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpreter runs that kernel, so jax's own reference of it takes its place: pages, lengths and order of the
    tokens. Every request has a cell (an idle one in an empty slot too), and none that is idle comes last."""

    def stand_in(q: Any, pages: Any, lengths: Any, table: Any, ends: Any, count: Any, **options: Any) -> jax.Array:
        assert int(lengths.min()) >= 1
        assert ends[count[0]] == ends[-1] > ends[count[0] - 1]
        for name in ("num_kv_pages_per_block", "num_queries_per_block"):
            del options[name]
        clean = jnp.nan_to_num(pages)  # the reference masks by adding
        out = ragged.ref_ragged_paged_attention(q, clean, lengths, table, ends, count, **options)
        return jnp.full(q.shape, jnp.nan, q.dtype).at[: out.shape[0]].set(out)

    ragged = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    package = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    monkeypatch.setattr(package, "ragged_paged_attention", stand_in)
    q, layout, cells, _ = case(dense=dense, size=128, dtype=jnp.float32)
    tokens = tokens_of(layout)
    if not dense:  # and a fourth request, idle in the empty slot 0
        zero = jnp.zeros(1, jnp.int32)
        tokens = tokens._replace(
            index=jnp.concatenate([tokens.index, tokens.index[:1]]),
            **{name: jnp.concatenate([getattr(tokens, name), zero]) for name in ("start", "count", "slot")},
        )
    got = np.asarray(tpu.slot_attention(q, tokens, cells, scale=0.1, window=window, context=CELLS))
    want = np.asarray(slot_attention(q, tokens, cells, scale=0.1, window=window, implementation="xla"))
    np.testing.assert_allclose(got[real(layout)], want[real(layout)], atol=1e-5)
    assert np.isfinite(got).all()


def test_cells_are_split_where_requests_alone_do_not_fill_the_device() -> None:
    """264 programs wanted, at least 256 cells a part."""
    assert [parts_for(1, 4096), parts_for(8, 4096), parts_for(512, 4096), parts_for(8, 200)] == [16, 16, 1, 1]


def test_naming_a_backend_means_that_one_or_an_error_with_the_reason() -> None:
    q, layout, cells, block = case(dense=True)
    tokens = tokens_of(layout)
    refused = [
        ("mosaic_gpu", (q, tokens, cells), "needs a hopper device"),
        ("mosaic_gpu", (q.astype(jnp.float32), tokens, cells), "bfloat16, float32"),
        ("mosaic_gpu", (q, tokens, cells._replace(k=cells.k[:, :, :, :100])), "100 cells"),
        ("tpu", (q, tokens, cells, block), "is causal"),
        ("tpu", (q, tokens, cells), "size 64"),
        ("cuda", (q, tokens, cells), "no backend 'cuda'"),
    ]
    for name, arguments, reason in refused:
        with pytest.raises(BackendError, match=reason):
            slot_attention(*arguments, scale=1.0, implementation=name)
    wide = case(size=128)
    with pytest.raises(BackendError, match="cannot be interpreted"):
        slot_attention(wide[0], tokens_of(wide[1]), wide[2], scale=1.0, implementation="tpu", interpret=True)
