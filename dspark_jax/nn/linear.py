"""Matrix products with weights stored ``[out, in]``, as they are or as integers of one byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.types import Array

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


_FEW_TOKENS = 32
"""Up to this many tokens a product on CPU is written as multiply-and-sum; see ``_product``."""


class Int8Matrix(flax.struct.PyTreeNode):
    """A weight ``[out, in]`` of one byte an entry: row r is ``values[r] * scale[r]``. It stands wherever ``linear``
    reads a weight; half the bytes of bfloat16, a quarter of float32's."""

    values: Array  # [out, in] int8
    scale: Array  # [out] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, rows: Any) -> Int8Matrix:
        """A slice of the rows."""
        return Int8Matrix(self.values[rows], self.scale[rows])


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(values int8 [out, in], scale float32 [out])``: the largest entry of every row becomes 127, all are rounded to
    the nearest (so each is off by at most ``scale / 2``). A row of zeros has scale 1."""
    wide = weight.astype(np.float32)
    largest = np.abs(wide).max(axis=1)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(wide / scale[:, None]).astype(np.int8), scale


def join_rows(weights: Sequence[Any]) -> Array | Int8Matrix:
    """Weights of the same input, all of one kind, as one: row behind row."""
    if isinstance(weights[0], Int8Matrix):
        return Int8Matrix(jnp.concatenate([w.values for w in weights]), jnp.concatenate([w.scale for w in weights]))
    return jnp.concatenate(weights)


def linear(
    weight: Array | Int8Matrix,
    x: Array,
    bias: Array | None = None,
    *,
    out_dtype: jnp.dtype | None = None,
    whole: bool = False,
) -> Array:
    """``x [..., in]`` times ``weight [out, in]`` transposed, plus ``bias [out]``: ``[..., out]``.

    ``whole``: never as multiply-and-sum. For a narrow ``in`` whose result goes straight into a reduction: XLA's CPU
    backend would fuse the two and run the sum without vectors.
    """
    lead = x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Int8Matrix):
        dtype = out_dtype or x.dtype
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # Integers up to 127 are exact in every dtype: the scales are all that rounds.
        rough = _product(weight.values.astype(x.dtype), flat, wide, whole)
        y = (rough * weight.scale.astype(wide)[None, :]).astype(dtype)
    else:
        y = _product(weight, flat, out_dtype or jnp.promote_types(weight.dtype, x.dtype), whole)
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    return y.reshape(*lead, weight.shape[0])


def _product(weight: Array, x: Array, dtype: jnp.dtype, whole: bool) -> Array:
    """``[T, in] x [out, in] -> [T, out]`` in the form that is fast on the backend at this T.

    XLA's CPU backend runs one token as a matrix-vector product at memory speed, but copies a whole weight into a
    packed buffer before it multiplies by two tokens or more. Written as a fused multiply-and-sum the weight is read
    once: 8 tokens then cost little more than one. With many tokens packing pays, the weight as the left operand.
    Measured: benchmarks/bench_linear.py.
    """
    precision = jax.lax.Precision.HIGHEST if weight.dtype in (jnp.float32, jnp.float64) else None
    tokens = x.shape[0]
    if jax.default_backend() != "cpu" or tokens == 1:
        return jax.lax.dot_general(x, weight, _CONTRACT_LAST, precision, dtype)
    if whole or tokens > _FEW_TOKENS:
        return jax.lax.dot_general(weight, x, _CONTRACT_LAST, precision, dtype).T
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.sum(weight.astype(wide)[:, None, :] * x.astype(wide)[None, :, :], axis=-1).T.astype(dtype)
