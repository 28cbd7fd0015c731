"""Rotary position embedding in its published variants. Frequencies are constants of the configuration."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from dspark_jax.config import RopeConfig
from dspark_jax.types import Array


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies ``[head_dim // 2]`` float64 and the factor on cos and sin (1.0 but for yarn).

    Raises ValueError for an unknown kind.
    """
    rotary = int(head_dim * rope.partial_rotary_factor)
    if rope.kind == "proportional":
        return _proportional(rope, head_dim), 1.0
    if rotary != head_dim:
        share = rope.partial_rotary_factor
        raise ValueError(f"rope kind {rope.kind!r}: partial_rotary_factor {share} is not supported")
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    raise ValueError(f"unknown rope kind {rope.kind!r}; known: default, linear, llama3, yarn, proportional")


def rope_tables(rope: RopeConfig, head_dim: int, position: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """cos and sin ``[T, head_dim // 2]`` of positions ``[T]``."""
    freqs, factor = inverse_frequencies(rope, head_dim)
    angle = position.astype(dtype)[:, None] * jnp.asarray(freqs, dtype)[None, :]
    return jnp.cos(angle) * dtype.type(factor), jnp.sin(angle) * dtype.type(factor)


def apply_rope(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates ``x [T, heads, D]``: the halves of the head form the pairs (Hugging Face layout)."""
    cos, sin = tables[0][:, None, :], tables[1][:, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(cos.dtype), x[..., half:].astype(cos.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _proportional(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Gemma 4: the first share of the frequencies rotates, the others stand still."""
    rotating = int(rope.partial_rotary_factor * head_dim // 2)
    freqs = np.zeros(head_dim // 2)
    freqs[:rotating] = rope.theta ** (-2.0 * np.arange(rotating) / head_dim)
    return freqs / rope.factor


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * base / rope.factor + blend * base
    return np.where(wavelength > low, base / rope.factor, np.where(wavelength < high, base, mixed))


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """NTK-by-parts interpolation (Peng et al., arXiv:2309.00071)."""

    def dimension(rotations: float) -> float:
        span = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        return head_dim * span / (2 * math.log(rope.theta))

    def temperature(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    freqs = base / rope.factor * ramp + base * (1 - ramp)
    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dim)
        else:
            factor = temperature(rope.factor)
    return freqs, factor
