"""Drafters: the contract (base), block drafters (DSpark = DFlash backbone + heads), chains (EAGLE-3, MTP), n-grams."""

from collections.abc import Mapping

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import DraftState, Proposal, SharedParams
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.drafters.eagle3 import Eagle3Drafter
from dspark_jax.drafters.loaded import LoadedDrafter
from dspark_jax.drafters.mtp import MTPDrafter
from dspark_jax.drafters.ngram import NgramDrafter
from dspark_jax.types import PyTree

KINDS: Mapping[str, type[LoadedDrafter]] = {
    "dspark": Drafter,
    "dflash": Drafter,
    "eagle3": Eagle3Drafter,
    "mtp": MTPDrafter,
}
"""Which class runs a config, by ``DrafterConfig.method``."""


def drafter_specs(config: DrafterConfig) -> PyTree:
    """Abstract parameters of a drafter of any kind, with the tensor names of its checkpoint."""
    return KINDS[config.method].specs(config)


__all__ = [
    "KINDS",
    "DraftState",
    "Drafter",
    "Eagle3Drafter",
    "LoadedDrafter",
    "MTPDrafter",
    "NgramDrafter",
    "Proposal",
    "SharedParams",
    "drafter_specs",
]
