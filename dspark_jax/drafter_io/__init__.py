"""Drafter configurations: every published spelling in, DeepSpec's (or speculators') out.

The same facts are written in four spellings (flat keys; ``dspark_*`` keys; nested ``dspark_config`` or
``dflash_config``; speculators' ``transformer_layer_config``), in two block layouts and in two conventions of
layer numbers. This package is the one place that knows them (FIELD.md, "Loading and layout"); everything else
sees a ``DrafterConfig``. Sources: deepseek-ai/DeepSpec, vllm-project/speculators, z-lab's DFlash.
"""

from __future__ import annotations

from dspark_jax.drafter_io.formats import (
    DEFAULT_SAMPLE_FROM_ANCHOR,
    drafter_format,
    drafts_of_slots,
    slots_of_drafts,
    speculators_type,
)
from dspark_jax.drafter_io.read import drafter_config_from_hf, head_tensors
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError
from dspark_jax.drafter_io.write import drafter_config_to_hf, drafter_config_to_speculators

__all__ = [
    "DEFAULT_SAMPLE_FROM_ANCHOR",
    "UnsupportedDrafterError",
    "drafter_config_from_hf",
    "drafter_config_to_hf",
    "drafter_config_to_speculators",
    "drafter_format",
    "drafts_of_slots",
    "head_tensors",
    "slots_of_drafts",
    "speculators_type",
]
