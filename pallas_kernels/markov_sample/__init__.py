"""The sequential Markov head with sampling: reference in XLA, Mosaic GPU (Hopper) and TPU kernels."""

from pallas_kernels.markov_sample.api import backend, markov_sample
from pallas_kernels.markov_sample.spec import Block, Head, Sampled, row_log_q

__all__ = ["Block", "Head", "Sampled", "backend", "markov_sample", "row_log_q"]
