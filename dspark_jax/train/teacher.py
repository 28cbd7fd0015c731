"""The frozen target as a teacher: features of whole sequences, and its probabilities where the loss asks."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.layout import dense_layout
from dspark_jax.nn.linear import linear
from dspark_jax.targets import Target
from dspark_jax.types import Array, accumulate_dtype


class TeacherHead(flax.struct.PyTreeNode):
    """The target's LM head cut in two: rows of the draft vocabulary in draft order, and all others."""

    inside: Array  # [Vd, d]
    outside: Array | None  # [V - Vd, d], without rows beyond the tokenizer
    softcap: float = flax.struct.field(pytree_node=False, default=0.0)

    @classmethod
    def build(cls, target: Target, d2t: np.ndarray | None) -> TeacherHead:
        """Splits a target's head; ``d2t`` None keeps it whole."""
        tied = target.config.tie_embeddings
        head = target.params["embed_tokens" if tied else "lm_head"]
        if d2t is None:
            return cls(head[: target.vocab_limit], None, target.config.logit_softcap)
        rest = np.setdiff1d(np.arange(target.vocab_limit), d2t)
        outside = head[jnp.asarray(rest)] if rest.size else None
        return cls(head[jnp.asarray(d2t)], outside, target.config.logit_softcap)

    def __call__(self, hidden: Array) -> tuple[Array, Array | None, Array]:
        """For final states ``[N, d]``.

        Returns:
            probabilities ``[N, Vd]`` of the draft vocabulary, ``[N]`` of all other tokens together (None where
            there are none), and ``[N]`` bool: the most probable token is in the draft vocabulary.
        """
        inside = self.logits(self.inside, hidden)
        top = jnp.max(inside, axis=-1)
        if self.outside is None:
            return jax.nn.softmax(inside, axis=-1), None, jnp.ones(top.shape, bool)
        outside = self.logits(self.outside, hidden)
        top_outside = jnp.max(outside, axis=-1)
        high = jnp.maximum(top, top_outside)[:, None]
        inside, rest = jnp.exp(inside - high), jnp.sum(jnp.exp(outside - high), axis=-1)
        total = jnp.sum(inside, axis=-1) + rest
        return inside / total[:, None], rest / total, top >= top_outside

    def logits(self, head: Array, hidden: Array) -> Array:
        logits = linear(head, hidden, out_dtype=accumulate_dtype(hidden.dtype))
        return self.softcap * jnp.tanh(logits / self.softcap) if self.softcap else logits


def teacher_states(target: Target, tokens: Array, taps: tuple[int, ...]) -> tuple[Array, Array]:
    """Final states ``[B, L, d]`` and tapped states ``[B, L, m * d]`` of right-padded sequences ``[B, L]``.

    Nothing behind a position reaches it, so padding needs no mask of its own.
    """
    rows, length = tokens.shape
    layout = dense_layout(jnp.zeros(rows, jnp.int32), jnp.full(rows, length), length)
    final, features, _ = target.forward(tokens.reshape(-1), layout, target.init_cache(rows, length), taps=taps)

    def per_row(x: Any) -> Array:
        return x.reshape(rows, length, -1)

    return per_row(final), per_row(features)
