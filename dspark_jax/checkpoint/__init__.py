"""Checkpoints: sources of named tensors, restoring with full error lists, writing safetensors."""

from __future__ import annotations

from dspark_jax.checkpoint.restore import (
    DERIVED_BUFFERS,
    Put,
    RenamedSource,
    TensorSource,
    check,
    require_dtype,
    restore,
    restore_abstract,
)
from dspark_jax.checkpoint.safetensors import SafetensorsSource, save

__all__ = [
    "DERIVED_BUFFERS",
    "Put",
    "RenamedSource",
    "SafetensorsSource",
    "TensorSource",
    "check",
    "require_dtype",
    "restore",
    "restore_abstract",
    "save",
]
