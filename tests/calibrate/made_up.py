"""Records of a confidence head."""

from __future__ import annotations

import numpy as np

from dspark_jax.calibrate import metrics


def records(count: int = 60, width: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overconfident logits (the truth is sigmoid(logit / 2)) and prefix labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, width))
    accepted = np.cumprod(rng.random((count, width)) < metrics.sigmoid(logits / 2), axis=1)
    return logits, accepted
