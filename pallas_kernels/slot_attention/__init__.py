"""Attention of ragged blocks against slot caches: reference in XLA, Mosaic GPU (Hopper), jax's own kernel on TPU."""

from pallas_kernels.slot_attention.api import backend, slot_attention
from pallas_kernels.slot_attention.spec import Cells, Own, Tokens

__all__ = ["Cells", "Own", "Tokens", "backend", "slot_attention"]
