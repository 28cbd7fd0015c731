"""Forms that only a GPU or a TPU takes compute what the CPU's form computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.kv_cache import write_rows
from dspark_jax.layout import dense_layout
from dspark_jax.nn import attention as room
from dspark_jax.nn.attention import CellBlock, KeyBlock, attention, causal_visible
from pallas_kernels.deviceless import as_if_on


@pytest.mark.parametrize("layer", [None, 1])
def test_one_scatter_writes_the_cells_that_the_loop_writes(layer: int | None) -> None:
    """Three rows of four places, from slot 1 on, at their own positions; every other cell is left alone."""
    rng = np.random.default_rng(0)
    lead = () if layer is None else (2,)
    cells, new = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((*lead, 4, 2, 12, 3), (3, 2, 4, 3)))
    layout = dense_layout(jnp.array([0, 5, 8]), jnp.array([4, 1, 3]), 4, 1)
    index = None if layer is None else jnp.int32(layer)
    expected = np.array(cells)
    for row, start in enumerate((0, 5, 8)):
        expected[(*(() if layer is None else (layer,)), 1 + row)][:, start : start + 4] = new[row]
    np.testing.assert_array_equal(write_rows(cells, new, layout, index), expected)
    with as_if_on("gpu"):
        np.testing.assert_array_equal(jax.jit(write_rows)(cells, new, layout, index), expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_attention_in_pieces_of_rows_is_that_of_all_rows(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows in pieces of two, two and one, read from a cache of seven slots."""
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.normal(size=(7, 2, 10, 4)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(5, 3, 4, 4)), jnp.float32)
    visible = causal_visible(jnp.array([0, 2, 4, 6, 3]), 3, 9, 0)
    whole = attention(q, [KeyBlock(k[1:6, :, :9], v[1:6, :, :9], visible)], 0.5)
    cells = [jnp.stack([jnp.full_like(a, jnp.nan), a]) if stacked else a for a in (k, v)]
    block = CellBlock(*cells, jnp.int32(1) if stacked else None, jnp.int32(1), visible)
    monkeypatch.setattr(room, "_MAX_SCORES", 2 * 4 * 3 * 9)
    np.testing.assert_allclose(attention(q, [block], 0.5), whole, rtol=1e-6, atol=1e-6)
