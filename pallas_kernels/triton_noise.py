"""``noise`` for Triton kernels, and what they do with a tile of scores: the same integers, the same formulas. Imported
by those kernels only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(h):
    """See ``noise.mix``; ``h`` is uint32, whose right shift fills with zeros."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def gumbel(word0, word1, ids):
    """Gumbel numbers of keys ``(word0, word1)`` (uint32) at target token ``ids`` (int32); shapes broadcast."""
    h = mix(mix(ids.to(tl.uint32) * 0x9E3779B1 + word0) ^ word1)
    u = h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33
    u = tl.minimum(u, 0.99999994039535522)  # 1 - 2^-24
    w = 1.0 - u
    gap = 1.0 - w
    ratio = -tl.log(w) / tl.where(gap == 0.0, 1.0, gap)
    return -tl.log(tl.where(gap == 0.0, u, u * ratio))


@triton.jit
def scores(x, inside):
    """``x [ROWS, TILE]`` where a masked column (-inf), or one that is not ``inside [TILE]`` the vocabulary, counts as
    LOW (tiles.py); what is no number stays none."""
    x = tl.maximum(x, -3.0e38, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(inside[None, :], x, -3.0e38)


@triton.jit
def exponentials(x):
    """``[ROWS]`` each: the largest score of a row, and the sum of exponentials of the distances from it."""
    top = tl.max(x, axis=1)
    return top, tl.sum(tl.exp(x - top[:, None]), axis=1)


@triton.jit
def draw(x, noise, noisy, at, VOCAB: tl.constexpr):
    """``[ROWS]`` each: the largest of scores and ``noise`` (of rows that are ``noisy``), and the first column of ``at``
    where it stands."""
    drawn = x + noise * noisy[:, None]
    best = tl.max(drawn, axis=1)
    return best, tl.min(tl.where(drawn == best[:, None], at[None, :], VOCAB - 1), axis=1)
