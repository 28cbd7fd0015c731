"""DSpark: the DFlash backbone, a sequential Markov head and a confidence head. Without heads it is DFlash."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dflash
from dspark_jax.drafters.base import DraftState, Numbers, Proposal, Sampler, base_row
from dspark_jax.drafters.loaded import LoadedDrafter
from dspark_jax.heads.confidence import confidence_logits, confidence_specs
from dspark_jax.heads.markov import initial_state, markov_bias, markov_hidden, markov_specs
from dspark_jax.kv_cache import init_cache
from dspark_jax.layout import Layout
from dspark_jax.sampling import mask_beyond
from dspark_jax.types import Array, PyTree, cond
from pallas_kernels import markov_sample as kernel

Drawn: TypeAlias = tuple[Array, Array, Array, Array | None, Array | None]
"""Places first: tokens, columns and log q ``[G, R]``, confidence logits ``[G, R]``, z ``[G, R, r]``."""


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
        h = dflash.block_hidden(
            self.config, self.params, self.shared, state, anchor, length, width, context, self.spread
        )
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
        with jax.named_scope("draft_backbone"):
            h = self.hidden(state, anchor, length, num_drafts, context).swapaxes(0, 1)
            base = mask_beyond(dflash.base_logits(self.config, self.shared, h), self.d2t, self.vocab_limit)
        one_by_one = partial(self._one_by_one, h, base, anchor, sampler)
        numbers = sampler.numbers(num_drafts)
        at_once = None if numbers is None else self._at_once(h, base, anchor, numbers)
        with jax.named_scope("markov_scan"):
            if numbers is None or at_once is None:
                drawn = one_by_one()
            else:
                drawn = cond(numbers.filtered, one_by_one, at_once)
        *first, confidence, z = drawn
        tokens, index, log_q = (a.swapaxes(0, 1) for a in first)
        confidence = None if confidence is None else confidence.swapaxes(0, 1)
        return Proposal(tokens, index, log_q, base, z, confidence)

    def _one_by_one(self, h: Array, base: Array, anchor: Array, sampler: Sampler) -> Drawn:
        """The plain way: a scan over the places ``h [G, R, d]``, ``base [G, R, Vd]`` that draws through ``sampler``."""
        config = self.config

        def step(carry, inputs):  # type: ignore[no-untyped-def]
            previous, markov, rule = carry
            h_k, base_k, k = inputs
            logits, e, z = base_k, None, None
            if config.markov_rank:
                e = self.params["markov"]["w1"][previous]
                z, markov = markov_hidden(config, self.params["markov"], markov, e, h_k)
                logits = base_k + markov_bias(self.params["markov"], z)
            token, index, log_q, rule = sampler.draw(rule, logits, k)
            confidence = None
            if config.confidence_head:
                confidence = confidence_logits(config, self.params["confidence"], h_k, e)
            return (token, markov, rule), (token, index, log_q, confidence, z)

        carry = (anchor, initial_state(config, anchor.shape[0], h.dtype), sampler.start())
        places = h.shape[0]
        unroll = places if jax.default_backend() == "cpu" else 1
        _, drawn = jax.lax.scan(step, carry, (h, base, jnp.arange(places)), unroll=unroll)
        return drawn  # type: ignore[no-any-return]

    def _at_once(self, h: Array, base: Array, anchor: Array, numbers: Numbers) -> Callable[[], Drawn] | None:
        """The fused way, by ``pallas_kernels.markov_sample``; None where it is not for this device and drafter."""
        if not self.config.markov_rank:
            return None
        markov, own = self.params["markov"], self.params.get("confidence", {})
        head = kernel.Head(
            markov["w1"],
            markov["w2"],
            gate=markov.get("gate"),
            gate_bias=markov.get("gate_bias"),
            joint=markov.get("joint"),
            joint_bias=markov.get("joint_bias"),
            confidence=own.get("proj"),
            confidence_bias=own.get("bias"),
        )
        block = kernel.Block(base, h, anchor, numbers.temperature, numbers.word0, numbers.word1, self.d2t)
        asked, interpret = numbers.implementation, numbers.interpret
        name = kernel.backend(head, block, implementation=asked, interpret=interpret, spread=self.spread)
        if name == "xla" and asked is None:
            return None

        def draw() -> Drawn:
            out = kernel.markov_sample(head, block, implementation=name, interpret=interpret)
            return out.tokens, out.column, out.log_q, out.confidence, out.z

        return draw

    def row_logits(self, proposal: Proposal, place: Array) -> Array:
        """See ``LoadedDrafter``: one product with W2 for one place of each row."""
        logits = base_row(proposal, place)
        if proposal.z is None:
            return logits
        return logits + markov_bias(self.params["markov"], proposal.z[place, jnp.arange(place.shape[0])])
