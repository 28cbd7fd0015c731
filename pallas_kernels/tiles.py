"""Shapes that kernels can cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """``x`` with zeros behind ``axis`` up to a multiple of ``multiple``; itself where there is nothing to add."""
    short = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x
