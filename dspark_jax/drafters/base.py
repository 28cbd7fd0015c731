"""The contract between a drafter and the decoding cycle, and the states that pass through it.

A drafter never imports a target. It offers

    init(slots, length)                                   -> state
    absorb(state, features, layout)                       -> state      tapped target states become context K/V
    propose(state, anchor, length, num_drafts, sampler)   -> Proposal   one block for every row

and a few facts: ``taps`` (target layers it reads), ``block_size``, ``has_confidence``, ``d2t``.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct

from dspark_jax.kv_cache import KVCache
from dspark_jax.layout import Layout
from dspark_jax.types import Array, PyTree


class SharedParams(flax.struct.PyTreeNode):
    """What a drafter borrows from its target, frozen: gradients are taken of the drafter's own tree only."""

    embed: Array  # [V, d]
    head: Array  # [Vd, d], one row a draft-vocabulary token
    d2t: Array | None  # [Vd] int32 target ids of the draft vocabulary; None: the whole vocabulary


class DraftState(flax.struct.PyTreeNode):
    """The context's keys and values. Same length as the target's cache whenever a block is drafted; the block's
    own keys are never kept."""

    cache: KVCache


class Proposal(flax.struct.PyTreeNode):
    """One drafted block for each of R rows."""

    tokens: Array  # [R, G] int32 target ids
    draft_index: Array  # [R, G] int32: the same tokens as columns of log_q
    log_q: Array  # [R, G, Vd] float32: log of the very distribution each token was drawn from
    confidence_logits: Array | None  # [R, G]; entry k never looks at token k


class Sampler(Protocol):
    """How the cycle lets a drafter draw a token; carries the logit rule along the block."""

    def start(self) -> PyTree:
        """State before the block's first draft."""
        ...

    def draw(self, state: PyTree, logits: Array, k: Array | int) -> tuple[Array, Array, Array, PyTree]:
        """From logits ``[R, Vd]`` of draft k: ``(token [R] target ids, index [R], log_q [R, Vd], state)``."""
        ...


class DrafterModel(Protocol):
    """What ``cycle.py`` needs of a drafter; ``testing.ScriptedDrafter`` implements it without a transformer."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...

    @property
    def has_confidence(self) -> bool: ...

    @property
    def d2t(self) -> Array | None: ...

    def init(self, slots: int, length: int) -> Any: ...

    def absorb(self, state: Any, features: Array, layout: Layout) -> Any: ...

    def propose(
        self, state: Any, anchor: Array, length: Array, num_drafts: int, sampler: Sampler, context: int | None = None
    ) -> Proposal: ...
