"""DSpark: the DFlash backbone, a sequential Markov head and a confidence head. Without heads it is DFlash."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dflash
from dspark_jax.drafters.base import DraftState, Proposal, Sampler, SharedParams
from dspark_jax.heads.confidence import confidence_logits, confidence_specs
from dspark_jax.heads.markov import initial_state, markov_bias, markov_hidden, markov_specs
from dspark_jax.kv_cache import init_cache
from dspark_jax.layout import Layout
from dspark_jax.nn.block import fuse_projections
from dspark_jax.params import init, on_one_device
from dspark_jax.sampling import mask_beyond
from dspark_jax.types import Array, PyTree


def drafter_specs(config: DrafterConfig) -> PyTree:
    """Abstract parameters of a DSpark or DFlash drafter, with DeepSpec's tensor names."""
    specs = dflash.backbone_specs(config)
    if config.markov_rank:
        specs["markov"] = markov_specs(config)
    if config.confidence_head:
        specs["confidence"] = confidence_specs(config)
    return specs


class Drafter(flax.struct.PyTreeNode):
    """A loaded drafter; implements the contract of ``drafters/base.py``. A pytree, like ``Target``."""

    params: PyTree
    shared: SharedParams
    calibration: Any
    config: DrafterConfig = flax.struct.field(pytree_node=False)
    name: str = flax.struct.field(pytree_node=False)
    vocab_limit: int = flax.struct.field(pytree_node=False)

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
    ) -> Drafter:
        """Wraps a parameter tree of ``drafter_specs(config)``.

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
        return cls(params, SharedParams(embed, head, d2t), calibration, config, name, limit)

    @classmethod
    def random(
        cls, config: DrafterConfig, key: Array, *, embed: Array, head: Array, d2t: Array | None = None
    ) -> Drafter:
        """A drafter with random weights, for tests and speed measurements."""
        params = init(drafter_specs(config), key, embed.dtype)
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
    def has_confidence(self) -> bool:
        """Proposals carry confidence logits."""
        return self.config.confidence_head

    @property
    def d2t(self) -> Array | None:
        """Target ids of the draft vocabulary, None where it is whole."""
        return self.shared.d2t

    def init(self, slots: int, length: int) -> DraftState:
        """An empty context cache."""
        return DraftState(init_cache(self.config.decoder.layers, slots, length, self.shared.embed.dtype))

    def absorb(self, state: DraftState, features: Array, layout: Layout) -> DraftState:
        """Tapped target states ``[T, m * d]`` become context keys and values at their positions."""
        with jax.named_scope("absorb"):
            return dflash.absorb(self.config, self.params, state, features, layout)

    def hidden(
        self, state: DraftState, anchor: Array, length: Array, num_drafts: int, context: int | None = None
    ) -> Array:
        """Backbone states ``[R, num_drafts, d]`` of the slots that predict the first ``num_drafts`` drafts."""
        width = self.config.block_width(num_drafts)
        first = 0 if self.config.sample_from_anchor else 1
        h = dflash.block_hidden(self.config, self.params, self.shared, state, anchor, length, width, context)
        return h[:, first : first + num_drafts]

    def propose(
        self,
        state: DraftState,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> Proposal:
        """Drafts ``num_drafts`` (static, at most G) tokens for each of R rows; row r reads slot r.

        Args:
            anchor: ``[R]`` last committed tokens, at positions ``length [R]``.
        """
        config = self.config
        with jax.named_scope("draft_backbone"):
            h = self.hidden(state, anchor, length, num_drafts, context)
            base = mask_beyond(dflash.base_logits(config, self.shared, h), self.d2t, self.vocab_limit)

        def step(carry, inputs):  # type: ignore[no-untyped-def]
            previous, markov, rule = carry
            h_k, base_k, k = inputs
            logits, e = base_k, None
            if config.markov_rank:
                e = self.params["markov"]["w1"][previous]
                z, markov = markov_hidden(config, self.params["markov"], markov, e, h_k)
                logits = base_k + markov_bias(self.params["markov"], z)
            token, index, log_q, rule = sampler.draw(rule, logits, k)
            confidence = None
            if config.confidence_head:
                confidence = confidence_logits(config, self.params["confidence"], h_k, e)
            return (token, markov, rule), (token, index, log_q, confidence)

        carry = (anchor, initial_state(config, anchor.shape[0], h.dtype), sampler.start())
        steps = (h.swapaxes(0, 1), base.swapaxes(0, 1), jnp.arange(num_drafts))
        unroll = num_drafts if jax.default_backend() == "cpu" else 1
        with jax.named_scope("markov_scan"):
            _, outputs = jax.lax.scan(step, carry, steps, unroll=unroll)
        return Proposal(*jax.tree.map(lambda a: a.swapaxes(0, 1), outputs))
