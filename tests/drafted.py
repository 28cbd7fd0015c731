"""What tests ask of a proposal beyond what verification does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafters.base import Proposal


def block_logits(drafter: Any, proposal: Proposal) -> jax.Array:
    """``[R, G, Vd]``: the logits of every place, rebuilt one after the other."""
    rows, places = proposal.tokens.shape
    rebuilt = [drafter.row_logits(proposal, jnp.full(rows, k)) for k in range(places)]
    return jnp.stack(rebuilt, axis=1)
