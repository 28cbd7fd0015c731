"""DSpark speculative decoding (Cheng et al., arXiv:2607.05147) in JAX."""

from __future__ import annotations

import importlib
from typing import Any

# Imported here and not on first use: the function must win over the module of the same name.
from dspark_jax.generate import GenerateOutput as GenerateOutput
from dspark_jax.generate import generate as generate

_EXPORTS = {
    "Sampling": "dspark_jax.config",
    "load_target": "dspark_jax.load",
    "load_drafter": "dspark_jax.load",
    "dspark_loss": "dspark_jax.train.loss",
    "Engine": "dspark_jax.engine",
    "EngineConfig": "dspark_jax.engine",
    "Request": "dspark_jax.engine",
}

__all__ = sorted([*_EXPORTS, "GenerateOutput", "generate"])


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: ``import dspark_jax`` alone stays light."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(list(globals()) + list(_EXPORTS))
