"""Matrix products with weights stored ``[out, in]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.types import Array

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


_FEW_TOKENS = 32
"""Up to this many tokens a product on CPU is written as multiply-and-sum; see ``_product``."""


def linear(
    weight: Array,
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
