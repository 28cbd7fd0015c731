"""The one source of random numbers: a counter-based integer hash, keyed by data and by nothing else.

A number is a pure function of (seed, counter, offset, purpose, target token id). The ``coupled`` rule and plain
decoding use counter = absolute position of the token that is drawn and purpose = PLAIN; ``rejection`` uses
counter = the request's own cycle number, the offset in the block and its own purposes (DESIGN section 2, idea 4).
No batch index, slot or clock enters, so neighbours cannot disturb a request. The hash is integer arithmetic only:
kernels recompute the same bits.
"""

from __future__ import annotations

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.types import Array, accumulate_dtype, cond

PLAIN = 0
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3

_GOLDEN = 0x9E3779B1
_LANE = 0x7FEB352D


class NoiseKey(flax.struct.PyTreeNode):
    """Key of one number (or one vocabulary row of numbers) for each of B rows."""

    seed: Array  # [B] uint32
    counter: Array  # [B] int32: absolute position (PLAIN) or cycle number (the others)
    offset: Array  # [B] int32: place in the block (0 for PLAIN)
    purpose: Array  # [B] int32


class Noise(Protocol):
    """What the decoding cycle asks of its randomness. Tests replace it by a tape that enumerates outcomes."""

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """Draws one index of each row of ``log_probs [B, V]``. ``ids [V]`` are the target token ids of the
        columns (None: 0..V-1); rows with ``greedy [B]`` take the arg-max."""
        ...

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """True with probability ``prob [B]`` (1 is certain, 0 impossible)."""
        ...


def mix(h: Array) -> Array:
    """A bijection of uint32 in which every input bit reaches every output bit (the finaliser of MurmurHash3)."""
    h = h ^ (h >> 16)
    h = h * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 13)
    h = h * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def key_words(key: NoiseKey) -> tuple[Array, Array]:
    """The two uint32 words ``[B]`` that stand for a key. Two independent chains: a single 32-bit word would let
    unrelated rows share their whole noise once in 2^32 pairs."""
    words = []
    for salt in (0x243F6A88, 0xB7E15162):
        h = mix(key.seed.astype(jnp.uint32) ^ jnp.uint32(salt))
        for part in (key.purpose, key.counter, key.offset):
            h = mix(h * jnp.uint32(5) + part.astype(jnp.uint32) + jnp.uint32(_LANE))
        words.append(h)
    return words[0], words[1]


def row_bits(key: NoiseKey, ids: Array) -> Array:
    """Hash bits ``[B, V]`` uint32 of each key at target token ids ``[V]``."""
    k0, k1 = key_words(key)
    lane = ids.astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    return mix(mix(lane[None, :] + k0[:, None]) ^ k1[:, None])


def unit(bits: Array, dtype: jnp.dtype) -> Array:
    """(h + 1/2) 2^-32 in the open interval (0, 1); float32 rounding is kept from reaching 1."""
    u = bits.astype(dtype) * dtype.type(2.0**-32) + dtype.type(2.0**-33)
    return jnp.minimum(u, dtype.type(1.0 - 2.0**-24))


def gumbel(bits: Array, dtype: jnp.dtype) -> Array:
    """-log(-log1p(-u)). The winner of an arg-max has u near 0, where all 32 bits count; a uniform near 1 with
    23 bits would distort tokens below 1e-6."""
    return -jnp.log(-jnp.log1p(-unit(bits, dtype)))


class HashNoise:
    """The product's noise. Stateless: two instances are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashNoise)

    def __hash__(self) -> int:
        return hash(HashNoise)

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """Gumbel-max: arg-max of log-probability plus noise; no noise is made where every row is greedy.

        On CPU the arg-max stands outside of the condition: XLA would fuse the noise into it, and its loop is scalar
        (118 ms instead of 17 for the 7 places of 8 rows of 49,152). Elsewhere it stands inside, so that indices leave
        the condition and no logits do: several devices would gather them.
        """
        columns = jnp.arange(log_probs.shape[-1]) if ids is None else ids
        dtype = accumulate_dtype(log_probs.dtype)

        def noisy(lp: Array) -> Array:
            return lp + jnp.where(greedy[:, None], dtype.type(0), gumbel(row_bits(key, columns), dtype))

        log_probs = log_probs.astype(dtype)

        def best(lp: Array) -> Array:
            return jnp.argmax(lp, axis=-1).astype(jnp.int32)

        if jax.default_backend() == "cpu":
            return best(cond(jnp.all(greedy), lambda lp: lp, noisy, log_probs))
        return cond(jnp.all(greedy), best, lambda lp: best(noisy(lp)), log_probs)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """u < prob, u from the row's hash at token id 0."""
        bits = row_bits(key, jnp.zeros(1, jnp.int32))[:, 0]
        return unit(bits, accumulate_dtype(prob.dtype)) < prob


HASH_NOISE = HashNoise()


def distinct_seeds(seeds: Array) -> Array:
    """Seeds ``[B]`` in which the k-th repetition of a seed is replaced by hash(seed, k).

    Two ``rejection`` rows that compete for admission must not share numbers (DESIGN section 2, idea 4).
    """
    same = seeds[:, None] == seeds[None, :]
    repeats = jnp.sum(jnp.tril(same, -1), axis=1).astype(jnp.uint32)
    mixed = mix(mix(seeds.astype(jnp.uint32) ^ jnp.uint32(0x452821E6)) + repeats * jnp.uint32(_GOLDEN))
    return jnp.where(repeats > 0, mixed, seeds.astype(jnp.uint32))
