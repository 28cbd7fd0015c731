"""Greedy speculative rounds, one at a time and in full view: what parity and its tests look at."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import Drafter
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
    drafter: Drafter

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


class Rounds:
    """Walks greedy rounds over one prompt."""

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

    def next(self) -> Round:
        """The next round; the anchor moves behind what it accepted.

        Raises ValueError where the cache is full.
        """
        if self.start + self.models.drafter.block_size + 1 > self._room:
            raise ValueError(f"no room for a round at position {self.start}: the walk has {self._room} cells")
        start, cells = self.start, [np.asarray(a) for a in (*self._state.cache.k, *self._state.cache.v)]
        half = len(cells) // 2
        out, self._cache, self._state = _round(
            self.models.target,
            self.models.drafter,
            self._cache,
            self._state,
            jnp.asarray([self._anchor], jnp.int32),
            jnp.asarray([start], jnp.int32),
        )
        values: dict[str, Any] = {name: None if a is None else np.asarray(a) for name, a in out.items()}
        choice = values["verify_logits"].argmax(-1)
        same = values["draft_tokens"] == choice[:-1]
        accepted = int(np.cumprod(same).sum())
        features = values.pop("features")
        result = Round(
            start=start,
            cache_length_before=self._before,
            anchor=self._anchor,
            context_features=self._features,
            accepted=accepted,
            next_token=int(choice[accepted]),
            cache_k=np.stack([a[0, :, :start] for a in cells[:half]]),
            cache_v=np.stack([a[0, :, :start] for a in cells[half:]]),
            **values,
        )
        self._before, self._features = start, features[: accepted + 1]
        self._anchor, self.start = result.next_token, start + accepted + 1
        return result


def _prefill_impl(target: Target, drafter: Drafter, tokens: Array, count: Array, cells: int) -> Any:
    size = tokens.shape[0]
    layout = dense_layout(jnp.zeros(1, jnp.int32), count, size)
    hidden, features, cache = target.forward(
        tokens, layout, target.init_cache(1, cells), taps=drafter.taps, context=size
    )
    state = drafter.absorb(drafter.init(1, cells), features, layout)
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
    return out, cache, drafter.absorb(state, features, layout)


_prefill = jax.jit(_prefill_impl, static_argnums=(4,))
_round = jax.jit(_round_impl)
