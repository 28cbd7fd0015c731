"""DSpark: the DFlash backbone, a sequential Markov head and a confidence head. Without heads it is DFlash."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dflash
from dspark_jax.drafters.base import DraftState, Proposal, Sampler
from dspark_jax.drafters.loaded import LoadedDrafter
from dspark_jax.heads.confidence import confidence_logits, confidence_specs
from dspark_jax.heads.markov import initial_state, markov_bias, markov_hidden, markov_specs
from dspark_jax.kv_cache import init_cache
from dspark_jax.layout import Layout
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


class Drafter(LoadedDrafter):
    """A DSpark or DFlash drafter; implements the contract of ``drafters/base.py``."""

    @staticmethod
    def specs(config: DrafterConfig) -> PyTree:
        """See ``drafter_specs``."""
        return drafter_specs(config)

    def init(self, slots: int, length: int) -> DraftState:
        """An empty context cache."""
        return DraftState(init_cache(self.config.decoder.layers, slots, length, self.shared.embed.dtype))

    def absorb(self, state: DraftState, features: Array, layout: Layout, tokens: Array, kept: Array) -> DraftState:
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
