"""The scheduler: how many drafts to verify, from survival probabilities and step times and nothing else.

This room imports neither tokens nor logits nor models, so that the non-anticipation argument of the paper
(arXiv:2607.05147, Appendix A) can be seen in its imports and signatures.
"""

from __future__ import annotations

from dspark_jax.schedule.prefix import (
    admit_early_stop,
    admit_early_stop_device,
    admit_threshold,
    admit_top_k,
    admit_top_k_device,
    capacity,
    survival,
    survival_device,
)
from dspark_jax.schedule.step_time import StepTimeTable

__all__ = [
    "StepTimeTable",
    "admit_early_stop",
    "admit_early_stop_device",
    "admit_threshold",
    "admit_top_k",
    "admit_top_k_device",
    "capacity",
    "survival",
    "survival_device",
]
