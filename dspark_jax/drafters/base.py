"""The contract between a drafter and the decoding cycle, and the states that pass through it.

A drafter never imports a target. It offers

    init(slots, length)                                   -> state
    absorb(state, features, layout, tokens, kept)         -> state      tapped target states become context K/V
    propose(state, anchor, length, num_drafts, sampler)   -> Proposal   one block for every row

    row_logits(proposal, place)                           -> [R, Vd]    what one draft of each row was drawn from

and a few facts: ``taps`` (target layers it reads), ``block_size``, ``max_drafts``, ``has_confidence``, ``d2t``,
``lookback`` (cached tokens before a place that ``absorb`` must be shown again in order to go on from there).

``absorb`` is told what the target was fed: ``tokens [T]`` of the forward that gave the features, rejected drafts
included, and how many places of each row stay (``kept [R]``; 0: the row takes no part, its places are garbage). A
block drafter writes everything ahead and looks at neither; a chain pairs the state of one token with the next token,
so it needs the tokens, and must know which state is still without a partner.
"""

from __future__ import annotations

from typing import Any, Protocol

import flax.struct
import jax.numpy as jnp

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
    """One drafted block for each of R rows.

    Verification needs the probabilities of the drafted tokens, and one whole row of each request at most: that of its
    first rejected draft. So the distributions are not kept; ``DrafterModel.row_logits`` rebuilds what one was drawn
    from.
    """

    tokens: Array  # [R, G] int32 target ids
    draft_index: Array  # [R, G] int32: the same tokens as columns of the draft vocabulary
    log_q: Array  # [R, G] float32: of each token, under the very distribution it was drawn from
    base: Array  # [G, R, Vd]: draft logits, without what the sequential head adds where there is one
    z: Array | None = None  # [G, R, r]: what W2 of the sequential head was multiplied by
    confidence_logits: Array | None = None  # [R, G]; entry k never looks at token k


class Numbers(flax.struct.PyTreeNode):
    """The draws of a whole block as data, for a pass that makes them all: one 32-bit hash a token, keyed by the words
    (``noise.key_words``) and the target id; the arg-max of logits / temperature + Gumbel is drawn."""

    temperature: Array  # [R]
    word0: Array  # [G, R] uint32
    word1: Array  # [G, R] uint32
    filtered: Array  # [] bool: some row asks for top-k, top-p or min-p, which such a pass does not apply
    implementation: str | None = flax.struct.field(pytree_node=False, default=None)  # see ``cycle.Static.fused``
    interpret: Any = flax.struct.field(pytree_node=False, default=None)


class Sampler(Protocol):
    """How the cycle lets a drafter draw a token; carries the logit rule along the block."""

    def start(self) -> PyTree:
        """State before the block's first draft."""
        ...

    def draw(self, state: PyTree, logits: Array, k: Array | int) -> tuple[Array, Array, Array, PyTree]:
        """From logits ``[R, Vd]`` of draft k: ``(token [R] target ids, index [R], log_q [R] of it, state)``."""
        ...

    def numbers(self, places: int) -> Numbers | None:
        """The draws of ``places`` drafts as data; None where only ``draw`` can make them (a logit rule, scripted
        noise)."""
        ...


def base_row(proposal: Proposal, place: Array) -> Array:
    """``[R, Vd]``: the base logits of draft ``place [R]`` of each row; ``row_logits`` where no head adds to them."""
    return proposal.base[place, jnp.arange(place.shape[0])]


def drafts_of_block(drafter: DrafterModel, wanted: int | None) -> int:
    """Drafts a block: ``wanted`` (``num_speculative_tokens``), or the drafter's own number where it is None.

    Raises ValueError where the drafter cannot make that many.
    """
    most = drafter.max_drafts
    drafts = drafter.block_size if wanted is None else int(wanted)
    if drafts < 1 or (most is not None and drafts > most):
        known = "be at least 1" if most is None else f"lie in 1..{most} (the drafter's block)"
        raise ValueError(f"num_speculative_tokens must {known}, found {drafts}")
    return drafts


def narrower_blocks(drafter: DrafterModel, drafts: int) -> tuple[int, ...]:
    """Numbers of drafts below ``drafts`` that the drafter makes with less work, ascending: the trained widths of a
    block drafter (``DrafterConfig.block_width``), any number of one that has none."""
    config = getattr(drafter, "config", None)
    if config is None or getattr(config, "chain", True):
        return tuple(range(1, drafts))
    slots, first = config.block_width(drafts), 0 if config.sample_from_anchor else 1
    # Of several numbers that run the same slots only the largest is worth a program.
    return tuple(w - first for w in sorted(config.block_widths) if w < slots and 1 <= w - first < drafts)


class DrafterModel(Protocol):
    """What ``cycle.py`` needs of a drafter; ``testing.ScriptedDrafter`` implements it without a transformer."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_drafts(self) -> int | None: ...

    @property
    def has_confidence(self) -> bool: ...

    @property
    def d2t(self) -> Array | None: ...

    @property
    def lookback(self) -> int: ...

    def init(self, slots: int, length: int) -> Any: ...

    def absorb(self, state: Any, features: Array, layout: Layout, tokens: Array, kept: Array) -> Any: ...

    def propose(
        self, state: Any, anchor: Array, length: Array, num_drafts: int, sampler: Sampler, context: int | None = None
    ) -> Proposal: ...

    def row_logits(self, proposal: Proposal, place: Array) -> Array: ...
