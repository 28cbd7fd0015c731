"""The counter-based hash noise, in operations that every kernel backend can lower.

The same integers as the decoding library's own noise (a test compares them): a number is a pure function of the two
words of its key and the target token id, so a kernel recomputes the bits the reference used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

_GOLDEN = 0x9E3779B1


def mix(h: Array) -> Array:
    """A bijection of uint32 in which every input bit reaches every output bit (the finaliser of MurmurHash3)."""
    h = h ^ (h >> jnp.uint32(16))
    h = h * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> jnp.uint32(13))
    h = h * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> jnp.uint32(16))


def bits(word0: Array, word1: Array, ids: Array) -> Array:
    """Hash bits (uint32) of keys ``(word0, word1)`` at target token ``ids`` (int32); shapes must already agree."""
    return mix(mix(ids.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + word0) ^ word1)


def unit(h: Array) -> Array:
    """u = (h + 1/2) 2^-32 in float32, kept inside (0, 1).

    Mosaic converts no uint32 to float: the integer goes through int32 in two halves (both exact, one rounding where
    they meet, as in a direct conversion).
    """
    high = (h >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * jnp.float32(256.0)
    low = (h & jnp.uint32(0xFF)).astype(jnp.int32).astype(jnp.float32)
    u = (high + low) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    return jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))


def gumbel(h: Array) -> Array:
    """-log(-log1p(-u)) in float32.

    Mosaic has no log1p: log1p(-u) is u log(w) / (w - 1) with w = 1 - u, whose rounding errors cancel.
    """
    u = unit(h)
    w = jnp.float32(1.0) - u
    gap = jnp.float32(1.0) - w
    ratio = -jnp.log(w) / jnp.where(gap == 0, jnp.float32(1.0), gap)
    return -jnp.log(jnp.where(gap == 0, u, u * ratio))
