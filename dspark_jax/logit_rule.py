"""Per-position logit rules: what penalties, logit biases and grammar masks have in common.

The target's row at a position is computed as plain decoding would compute it: the rule's state has then seen every
token before the position, drafted ones included (FIELD.md, "Sampling and exactness"). A rule is therefore a state
machine over tokens plus a map of logits, and the decoding cycle needs to know nothing else about it.
"""

from __future__ import annotations

from typing import Protocol

import flax.struct
import jax.numpy as jnp

from dspark_jax.types import Array, PyTree


class LogitRule(Protocol):
    """``state`` is a pytree whose leaves all have the row axis first. A rule is static and hashable."""

    def apply(self, state: PyTree, logits: Array, ids: Array | None) -> Array:
        """Logits ``[B, V']`` under the rule. ``ids [V']``: target ids of the columns, None for 0..V-1."""
        ...

    def advance(self, state: PyTree, tokens: Array, valid: Array) -> PyTree:
        """The state after ``tokens [B]`` (target ids); rows where ``valid [B]`` is False stay as they are."""
        ...


class PenaltyState(flax.struct.PyTreeNode):
    """Counts and strengths of B rows."""

    in_prompt: Array  # [B, V] bool
    counts: Array  # [B, V] int32, tokens generated so far
    presence: Array  # [B] float32, subtracted once from every generated token
    frequency: Array  # [B] float32, subtracted for every occurrence
    repetition: Array  # [B] float32, divides positive and multiplies negative logits of seen tokens; 1 = off


class Penalties:
    """Repetition, frequency and presence penalties as OpenAI and Hugging Face define them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Penalties)

    def __hash__(self) -> int:
        return hash(Penalties)

    def apply(self, state: PenaltyState, logits: Array, ids: Array | None) -> Array:
        counts = state.counts if ids is None else state.counts[:, ids]
        in_prompt = state.in_prompt if ids is None else state.in_prompt[:, ids]
        seen = (counts > 0) | in_prompt
        factor = state.repetition.astype(logits.dtype)[:, None]
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, repeated, logits)
        logits = logits - state.frequency.astype(logits.dtype)[:, None] * counts
        return logits - state.presence.astype(logits.dtype)[:, None] * (counts > 0)

    def advance(self, state: PenaltyState, tokens: Array, valid: Array) -> PenaltyState:
        rows = jnp.arange(tokens.shape[0])
        safe = jnp.where(valid, tokens, 0)
        return state.replace(counts=state.counts.at[rows, safe].add(valid.astype(state.counts.dtype)))
