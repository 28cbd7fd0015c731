"""Drafters: the contract (base), the DFlash backbone, and DSpark = backbone + heads."""

from dspark_jax.drafters.base import DraftState, Proposal, SharedParams
from dspark_jax.drafters.dspark import Drafter, drafter_specs

__all__ = ["DraftState", "Drafter", "Proposal", "SharedParams", "drafter_specs"]
