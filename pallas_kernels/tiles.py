"""Shapes that kernels can cut, and what the tiles of a vocabulary are put together with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOW = -3.0e38
"""What a masked column counts as: below every logit, and exp(LOW - anything) is 0."""

FAR = 2**31 - 1
"""A column behind every other."""


def padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """``x`` with zeros behind ``axis`` up to a multiple of ``multiple``; itself where there is nothing to add."""
    short = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x


def of_best_tile(best: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """``others [tiles, rows]`` at the tile where ``best`` is largest, the earliest among equals: ``[rows]`` each."""
    winner = jnp.argmax(best, axis=0)[None]
    return [jnp.take_along_axis(x, winner, axis=0)[0] for x in others]


def log_sum_exp(top: jax.Array, total: jax.Array) -> jax.Array:
    """``[rows]`` from each tile's maximum and its sum of exponentials below that maximum, ``[tiles, rows]``."""
    high = jnp.max(top, axis=0)
    return high + jnp.log(jnp.sum(total * jnp.exp(top - high[None]), axis=0))
