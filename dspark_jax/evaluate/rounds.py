"""Greedy speculative rounds, one at a time and in full view: what parity and its tests look at."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import Drafter, LoadedDrafter
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.heads.confidence import confidence_logits
from dspark_jax.heads.markov import initial_state, markov_bias, markov_hidden
from dspark_jax.layout import dense_layout
from dspark_jax.targets import Target
from dspark_jax.types import Array

Arrays = dict[str, np.ndarray]

CELLS = 64
"""Prompts and caches are padded to multiples of this, so that few programs are compiled."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    x = np.asarray(logits, np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and its drafter."""

    target: Target
    drafter: LoadedDrafter

    def prefill(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Final states ``[n, d]``, tapped features ``[n, m * d]`` and logits ``[n, V]`` of a text."""
        n = len(ids)
        padded = np.zeros(-(-n // CELLS) * CELLS, np.int32)
        padded[:n] = ids
        outputs, _, _ = _prefill(self.target, self.drafter, jnp.asarray(padded), jnp.asarray([n]), len(padded))
        hidden, features, logits = (np.asarray(x)[:n] for x in outputs)
        return hidden, features, logits

    def context(self, ids: np.ndarray) -> Any:
        """Drafter state with the whole text as context."""
        n = len(ids)
        padded = np.zeros(-(-n // CELLS) * CELLS, np.int32)
        padded[:n] = ids
        return _prefill(self.target, self.drafter, jnp.asarray(padded), jnp.asarray([n]), len(padded))[2]

    def to_target_ids(self, logits: np.ndarray) -> np.ndarray:
        """Draft-vocabulary logits as columns of the target's vocabulary, -inf where a token cannot be drafted."""
        d2t = self.drafter.d2t
        if d2t is None:
            return logits
        wide = np.full((*logits.shape[:-1], self.target.vocab_size), -np.inf)
        wide[..., np.asarray(d2t)] = logits
        return wide


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: K drafts, K + 1 target rows."""

    start: int
    cache_length_before: int
    anchor: int
    context_features: np.ndarray  # [c, m * d], new in this round
    block_hidden: np.ndarray  # [K, d]
    base_logits: np.ndarray  # [K, Vd]
    corrected_logits: np.ndarray  # [K, Vd]
    draft_tokens: np.ndarray  # [K]
    confidence_logits: np.ndarray | None  # [K]
    verify_logits: np.ndarray  # [K + 1, V]
    accepted: int
    next_token: int
    cache_k: np.ndarray  # [layers, Hk, start, D]: the drafter's context
    cache_v: np.ndarray

    @property
    def draft_logits(self) -> np.ndarray:
        """``[K, Vd]``: what the drafts were taken from."""
        return self.corrected_logits

    def arrays(self, models: Models, with_cache: bool) -> Arrays:
        """The round under the reference's keys."""
        k, before, start = len(self.draft_tokens), self.cache_length_before, self.start
        p, q = softmax(self.verify_logits[:k]), softmax(models.to_target_ids(self.corrected_logits))
        mask = models.drafter.config.mask_token_id
        out: dict[str, Any] = {
            "start": start,
            "cache_len_before": before,
            "cache_len_after": start,
            "context_features": self.context_features,
            "block_input_ids": np.asarray([self.anchor, *[mask] * (k - 1)]),
            "position_ids": np.arange(before, start + k),
            "block_hidden": self.block_hidden,
            "base_logits": self.base_logits,
            "corrected_logits": self.corrected_logits,
            "draft_tokens": self.draft_tokens,
            "verify_logits": self.verify_logits,
            "accepted_draft_tokens": self.accepted,
            "next_token": self.next_token,
            "accept_rate_t1": np.minimum(p, q).sum(-1),
        }
        if self.confidence_logits is not None:
            out["confidence_logits"] = self.confidence_logits
        if with_cache:
            out["cache_k"], out["cache_v"] = self.cache_k, self.cache_v
        return {name: np.asarray(value) for name, value in out.items()}


class Walk:
    """Where greedy rounds over one prompt stand; a kind of drafter adds the round itself."""

    def __init__(self, models: Models, prompt: np.ndarray, cells: int = 0) -> None:
        self.models, self.start, self._before = models, len(prompt), 0
        size = -(-len(prompt) // CELLS) * CELLS
        self._room = -(-max(cells, size + 4 * CELLS) // CELLS) * CELLS
        padded = np.zeros(size, np.int32)
        padded[: len(prompt)] = prompt
        outputs, self._cache, self._state = _prefill(
            models.target, models.drafter, jnp.asarray(padded), jnp.asarray([len(prompt)]), self._room
        )
        self._features = np.asarray(outputs[1])[: len(prompt)]
        self._anchor = int(np.asarray(outputs[2])[len(prompt) - 1].argmax())

    def _run(self, one_round: Any) -> dict[str, Any]:
        """Outputs of ``one_round`` (compiled) on the host, None where it has none; the caches move on.

        Raises ValueError where the cache is full.
        """
        if self.start + self.models.drafter.block_size + 1 > self._room:
            raise ValueError(f"no room for a round at position {self.start}: the walk has {self._room} cells")
        anchor, start = jnp.asarray([self._anchor], jnp.int32), jnp.asarray([self.start], jnp.int32)
        out, self._cache, self._state = one_round(
            self.models.target, self.models.drafter, self._cache, self._state, anchor, start
        )
        return {name: None if a is None else np.asarray(a) for name, a in out.items()}

    def _move_on(self, drafts: np.ndarray, verify_logits: np.ndarray, features: np.ndarray) -> tuple[int, int]:
        """(accepted drafts, next token); the anchor moves behind what was accepted."""
        choice = verify_logits.argmax(-1)
        accepted = int(np.cumprod(drafts == choice[:-1]).sum())
        self._before, self._features = self.start, features[: accepted + 1]
        self._anchor, self.start = int(choice[accepted]), self.start + accepted + 1
        return accepted, self._anchor


class Rounds(Walk):
    """Walks greedy rounds of a block drafter over one prompt."""

    def next(self) -> Round:
        """The next round. Raises ValueError where the cache is full."""
        start, before, anchor, context = self.start, self._before, self._anchor, self._features
        cells = [np.asarray(a) for a in (*self._state.cache.k, *self._state.cache.v)]
        half = len(cells) // 2
        values = self._run(_round)
        accepted, token = self._move_on(values["draft_tokens"], values["verify_logits"], values.pop("features"))
        return Round(
            start=start,
            cache_length_before=before,
            anchor=anchor,
            context_features=context,
            accepted=accepted,
            next_token=token,
            cache_k=np.stack([a[0, :, :start] for a in cells[:half]]),
            cache_v=np.stack([a[0, :, :start] for a in cells[half:]]),
            **values,
        )


def _prefill_impl(target: Target, drafter: LoadedDrafter, tokens: Array, count: Array, cells: int) -> Any:
    size = tokens.shape[0]
    layout = dense_layout(jnp.zeros(1, jnp.int32), count, size)
    hidden, features, cache = target.forward(
        tokens, layout, target.init_cache(1, cells), taps=drafter.taps, context=size
    )
    state = drafter.absorb(drafter.init(1, cells), features, layout, tokens, count)
    return (hidden, features, target.unembed(hidden)), cache, state


def _round_impl(target: Target, drafter: Drafter, cache: Any, state: Any, anchor: Array, length: Array) -> Any:
    """Drafts greedily, keeps every intermediate, verifies all drafts, absorbs all features."""
    config, params, k = drafter.config, drafter.params, drafter.block_size
    hidden = drafter.hidden(state, anchor, length, k)
    base = base_logits(config, drafter.shared, hidden)
    previous, markov = anchor, initial_state(config, 1, hidden.dtype)
    corrected, drafts, confidences = [], [], []
    for j in range(k):
        logits, e = base[:, j], None
        if config.markov_rank:
            e = params["markov"]["w1"][previous]
            z, markov = markov_hidden(config, params["markov"], markov, e, hidden[:, j])
            logits = logits + markov_bias(params["markov"], z)
        if config.confidence_head:
            confidences.append(confidence_logits(config, params["confidence"], hidden[:, j], e)[0])
        index = jnp.argmax(logits, axis=-1)
        previous = (index if drafter.d2t is None else drafter.d2t[index]).astype(jnp.int32)
        corrected.append(logits[0])
        drafts.append(previous[0])
    layout = dense_layout(length, jnp.full(1, k + 1), k + 1)
    tokens = jnp.concatenate([anchor, jnp.stack(drafts)])
    final, features, cache = target.forward(tokens, layout, cache, taps=drafter.taps)
    out = {
        "block_hidden": hidden[0],
        "base_logits": base[0],
        "corrected_logits": jnp.stack(corrected),
        "draft_tokens": jnp.stack(drafts),
        "confidence_logits": jnp.stack(confidences) if confidences else None,
        "verify_logits": target.unembed(final),
        "features": features,
    }
    return out, cache, drafter.absorb(state, features, layout, tokens, layout.count)


_prefill = jax.jit(_prefill_impl, static_argnums=(4,))
_round = jax.jit(_round_impl)
