"""Fused acceptance: reference in XLA, Mosaic GPU (Hopper) and TPU kernels for the pass over the target's logits."""

from pallas_kernels.verify.api import backend, row_statistics, verify
from pallas_kernels.verify.spec import Outcome, Requests, Rows, RowStatistics

__all__ = ["Outcome", "Requests", "Rows", "RowStatistics", "backend", "row_statistics", "verify"]
