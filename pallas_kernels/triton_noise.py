"""``noise`` for Triton kernels: the same integers, the same formulas. Imported by those kernels only."""

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
