"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.types import Array, accumulate_dtype


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """``x / rms(x) * weight`` over the last axis, computed in float32 or wider; ``weight`` None leaves it out."""
    wide = x.astype(accumulate_dtype(x.dtype))
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    # The reference rounds to the model's dtype before the weight is applied.
    scaled = scaled.astype(x.dtype)
    if weight is None:
        return scaled
    return scaled * weight.reshape((1,) * (x.ndim - 1) + weight.shape)
