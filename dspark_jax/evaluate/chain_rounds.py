"""Greedy rounds of a chain (EAGLE-3, MTP), one at a time and in full view."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.evaluate.rounds import Arrays, Models, Walk, softmax
from dspark_jax.layout import dense_layout
from dspark_jax.nn.norm import rms_norm
from dspark_jax.targets import Target
from dspark_jax.types import Array


@dataclasses.dataclass(frozen=True)
class ChainRound:
    """One round: c new pairs, K drafts, K + 1 target rows."""

    start: int
    cache_length_before: int
    features: np.ndarray  # [c, m * d] of positions cache_length_before .. start - 1
    tokens: np.ndarray  # [c] their partners, one position further; the last one is the anchor
    step_hidden: np.ndarray  # [K, d] before the last norm
    draft_logits: np.ndarray  # [K, Vd]
    draft_tokens: np.ndarray  # [K]
    verify_logits: np.ndarray  # [K + 1, V]
    accepted: int
    next_token: int
    cache_k: np.ndarray  # [1, Hk, start, D]: the verified pairs, that of the anchor included
    cache_v: np.ndarray

    def arrays(self, models: Models, with_cache: bool) -> Arrays:
        """The round under the reference's keys."""
        k = len(self.draft_tokens)
        p, q = softmax(self.verify_logits[:k]), softmax(models.to_target_ids(self.draft_logits))
        out: dict[str, Any] = {
            "start": self.start,
            "cache_len_before": self.cache_length_before,
            "cache_len_after": self.start,
            "ext_features": self.features,
            "ext_input_ids": self.tokens,
            "ext_position_ids": np.arange(self.cache_length_before, self.start),
            "draft_hidden": self.step_hidden[0],
            "step_hidden": self.step_hidden,
            "step_position_ids": self.start + np.arange(k),  # of the forward behind each state, the last one unused
            "draft_logits": self.draft_logits,
            "draft_tokens": self.draft_tokens,
            "verify_logits": self.verify_logits,
            "accepted_draft_tokens": self.accepted,
            "next_token": self.next_token,
            "accept_rate_t1": np.minimum(p, q).sum(-1),
        }
        if with_cache:
            out["cache_k"], out["cache_v"] = self.cache_k, self.cache_v
        return {name: np.asarray(value) for name, value in out.items()}


class ChainRounds(Walk):
    """Walks greedy rounds of a chain over one prompt."""

    def __init__(self, models: Models, prompt: np.ndarray, cells: int = 0) -> None:
        super().__init__(models, prompt, cells)
        self._tokens = np.asarray([*prompt[1:], self._anchor])

    def next(self) -> ChainRound:
        """The next round. Raises ValueError where the cache is full."""
        start, before, features, tokens = self.start, self._before, self._features, self._tokens
        values = self._run(_chain_round)
        drafts = values["draft_tokens"]
        accepted, token = self._move_on(drafts, values["verify_logits"], values.pop("features"))
        self._tokens = np.asarray([*drafts[:accepted], token])
        # The pair of token position c lies in cell c; that of the anchor was written by the verification.
        pairs = {f"cache_{x}": np.asarray(getattr(self._state.cache, x)[0])[:, :, 1 : start + 1] for x in "kv"}
        return ChainRound(start, before, features, tokens, accepted=accepted, next_token=token, **pairs, **values)


@jax.jit
def _chain_round(
    target: Target, drafter: ChainDrafter, cache: Any, state: Any, anchor: Array, length: Array
) -> tuple[dict[str, Array], Any, Any]:
    """Drafts greedily, verifies all drafts, absorbs all features."""
    k, config = drafter.block_size, drafter.config
    proposal, hidden = drafter.walk(state, anchor, length, k, _ArgMax(drafter.d2t))
    normed = rms_norm(hidden[0], drafter.params["norm"], config.decoder.rms_norm_eps)
    layout = dense_layout(length, jnp.full(1, k + 1), k + 1)
    tokens = jnp.concatenate([anchor, proposal.tokens[0]])
    final, features, cache = target.forward(tokens, layout, cache, taps=drafter.taps)
    out = {
        "step_hidden": hidden[0],
        "draft_logits": base_logits(config, drafter.shared, normed),
        "draft_tokens": proposal.tokens[0],
        "verify_logits": target.unembed(final),
        "features": features,
    }
    choice = jnp.argmax(out["verify_logits"], axis=-1)
    accepted = jnp.sum(jnp.cumprod(proposal.tokens[0] == choice[:-1]))
    return out, cache, drafter.absorb(state, features, layout, tokens, accepted[None] + 1)


class _ArgMax:
    """A sampler that takes the most probable token."""

    def __init__(self, d2t: Array | None) -> None:
        self.d2t = d2t

    def start(self) -> None:
        return None

    def numbers(self, places: int) -> None:
        return None

    def draw(self, state: None, logits: Array, k: Array | int) -> tuple[Array, Array, Array, None]:
        index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return index if self.d2t is None else self.d2t[index].astype(jnp.int32), index, jnp.max(logits, axis=-1), None
