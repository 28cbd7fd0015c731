"""Targets with layers of one byte an entry: what is rounded, what is not, and that they decode like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_target
from dspark_jax.layout import dense_layout
from dspark_jax.nn.linear import Int8Matrix, join_rows, linear, quantize_rows
from tests.test_load_target import write


def test_every_row_has_its_own_scale_and_rounds_to_the_nearest() -> None:
    """By hand: row 0 has largest entry 1.27, so scale 0.01; row 1 is a hundred times that; row 2 is zero."""
    weight = np.array([[1.27, -0.014, 0.016], [127.0, -1.4, 1.6], [0.0, 0.0, 0.0]], np.float32)
    values, scale = quantize_rows(weight)
    np.testing.assert_array_equal(values, [[127, -1, 2], [127, -1, 2], [0, 0, 0]])
    np.testing.assert_allclose(scale, [0.01, 1.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 40])  # the forms of a product on CPU
def test_a_product_is_that_of_the_rounded_weight(tokens: int) -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(6, 16)).astype(np.float32), rng.normal(size=(tokens, 16)).astype(np.float32)
    values, scale = quantize_rows(weight)
    matrix = Int8Matrix(jnp.asarray(values), jnp.asarray(scale))
    rounded = values.astype(np.float64) * scale[:, None]
    np.testing.assert_allclose(linear(matrix, jnp.asarray(x)), x @ rounded.T, atol=1e-5)
    assert np.abs(rounded - weight).max() <= scale.max() / 2 * 1.0001
    both = join_rows([matrix, matrix[2:4]])
    np.testing.assert_allclose(linear(both, jnp.asarray(x)), x @ np.concatenate([rounded, rounded[2:4]]).T, atol=1e-5)


def test_layers_are_bytes_and_logits_are_those_of_the_rounded_weights(tmp_path: Path) -> None:
    path = write(tmp_path)
    plain, small = load_target(path, dtype="float32"), load_target(path, dtype="float32", quantization="int8")

    def kind(x: Any) -> bool:
        return isinstance(x, Int8Matrix)

    matrices = [x for x in jax.tree.leaves(small.params["layers"], is_leaf=kind) if kind(x)]
    assert len(matrices) == 4 * small.config.num_layers  # qkv, o, gate and up, down
    assert all(m.values.dtype == jnp.int8 for m in matrices)
    np.testing.assert_array_equal(small.params["embed_tokens"], plain.params["embed_tokens"])

    def spelled_out(x: Any) -> Any:
        return x.values.astype(jnp.float32) * x.scale[:, None] if kind(x) else x

    rounded = plain.replace(params=jax.tree.map(spelled_out, small.params, is_leaf=kind))
    tokens = jnp.arange(1, 7, dtype=jnp.int32)
    layout = dense_layout(jnp.zeros(1, jnp.int32), jnp.full(1, 6), 6)

    def logits(target: Any) -> np.ndarray:
        return np.asarray(target.unembed(target.forward(tokens, layout, target.init_cache(1, 8))[0]))

    np.testing.assert_allclose(logits(small), logits(rounded), atol=1e-4)
    assert np.abs(logits(small) - logits(plain)).max() > 1e-4  # it is another model


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantization must be None or one of int8, found 'int3'"):
        load_target(tmp_path, quantization="int3")
