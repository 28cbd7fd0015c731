"""What every loaded drafter is: parameters, borrowed tables and configuration in one pytree."""

from __future__ import annotations

from typing import Any, Self

import flax.struct
import jax

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Proposal, Sampler, SharedParams, base_row
from dspark_jax.layout import Layout
from dspark_jax.nn.block import fuse_projections
from dspark_jax.params import init, on_one_device, spread
from dspark_jax.types import Array, PyTree


class LoadedDrafter(flax.struct.PyTreeNode):
    """The common half of the drafters; a pytree, like ``Target``. Each kind adds ``init``, ``absorb``, ``propose``."""

    params: PyTree
    shared: SharedParams
    calibration: Any
    config: DrafterConfig = flax.struct.field(pytree_node=False)
    name: str = flax.struct.field(pytree_node=False)
    vocab_limit: int = flax.struct.field(pytree_node=False)
    spread: bool = flax.struct.field(
        pytree_node=False, default=False
    )  # over several devices: no kernel is cut for them

    @staticmethod
    def specs(config: DrafterConfig) -> PyTree:
        """Abstract parameters of this kind of drafter, with the checkpoint's tensor names."""
        raise NotImplementedError

    @classmethod
    def build(
        cls,
        params: PyTree,
        config: DrafterConfig,
        *,
        embed: Array,
        head: Array,
        d2t: Array | None = None,
        calibration: Any = None,
        name: str = "",
        vocab_limit: int | None = None,
        fuse: bool | None = None,
    ) -> Self:
        """Wraps a parameter tree of ``specs(config)``.

        Args:
            embed: ``[V, d]``. head: ``[Vd, d]``, rows in draft ids. d2t: ``[Vd]`` int32 target ids, or None.
            vocab_limit: target ids at or beyond it are never drafted; None: the vocabulary size.
            fuse: q, k, v and gate, up as one matrix each, for decoding; None: on one CPU device.
        """
        if fuse is None:
            fuse = jax.default_backend() == "cpu" and on_one_device(params)
        if fuse:
            params = {**params, "layers": [fuse_projections(layer) for layer in params["layers"]]}
        if head.shape[0] != config.draft_vocab_size:
            raise ValueError(f"head has {head.shape[0]} rows for a draft vocabulary of {config.draft_vocab_size}")
        if (d2t is None) != (not config.trimmed):
            raise ValueError("a trimmed draft vocabulary needs its d2t map, and a whole one has none")
        limit = config.decoder.vocab_size if vocab_limit is None else vocab_limit
        shared = SharedParams(embed, head, d2t)
        return cls(params, shared, calibration, config, name, limit, spread((params, shared)))

    @classmethod
    def random(cls, config: DrafterConfig, key: Array, *, embed: Array, head: Array, d2t: Array | None = None) -> Self:
        """A drafter with random weights, for tests and speed measurements."""
        params = init(cls.specs(config), key, embed.dtype)
        return cls.build(params, config, embed=embed, head=head, d2t=d2t)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.config.target_layer_ids

    @property
    def block_size(self) -> int:
        """G, drafts of a whole block."""
        return self.config.block_size

    @property
    def max_drafts(self) -> int | None:
        """The most drafts a block may have; None: any number."""
        return self.config.block_size

    @property
    def lookback(self) -> int:
        """0: a context cell is a function of its own token's features."""
        return 0

    @property
    def has_confidence(self) -> bool:
        """Proposals carry confidence logits."""
        return self.config.confidence_head

    @property
    def d2t(self) -> Array | None:
        """Target ids of the draft vocabulary, None where it is whole."""
        return self.shared.d2t

    def init(self, slots: int, length: int) -> Any:
        """An empty state of the kind; see ``base.py`` for this and the two below."""
        raise NotImplementedError

    def absorb(self, state: Any, features: Array, layout: Layout, tokens: Array, kept: Array) -> Any:
        """What the target has just seen becomes context."""
        raise NotImplementedError

    def propose(
        self,
        state: Any,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> Proposal:
        """A block of drafts for every row."""
        raise NotImplementedError

    def row_logits(self, proposal: Proposal, place: Array) -> Array:
        """``[R, Vd]``: the logits that draft ``place [R]`` of each row was drawn from, before rule and filters."""
        return base_row(proposal, place)
