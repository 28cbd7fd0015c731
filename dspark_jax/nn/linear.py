"""Matrix products with weights stored ``[out, in]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.types import Array

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def linear(weight: Array, x: Array, bias: Array | None = None, *, out_dtype: jnp.dtype | None = None) -> Array:
    """``x [..., in]`` times ``weight [out, in]`` transposed, plus ``bias [out]``: ``[..., out]``.

    On CPU with two tokens or more the weight is the left operand: XLA's CPU backend packs the right operand of a
    product before use, and packing the small side instead of the weight halves the time at 2 to 32 tokens (one
    token is a matrix-vector product, which reads the weight once either way).
    """
    lead = x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    precision = jax.lax.Precision.HIGHEST if weight.dtype in (jnp.float32, jnp.float64) else None
    accumulate = out_dtype or jnp.promote_types(weight.dtype, x.dtype)
    if jax.default_backend() == "cpu" and flat.shape[0] > 1:
        y = jax.lax.dot_general(weight, flat, _CONTRACT_LAST, precision, accumulate).T
    else:
        y = jax.lax.dot_general(flat, weight, _CONTRACT_LAST, precision, accumulate)
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    return y.reshape(*lead, weight.shape[0])
