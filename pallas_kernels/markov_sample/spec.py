"""What goes into the sequential head and what comes out of it; shared by backends, tests and benchmarks.

Shapes: B rows, G places in a block, V draft vocabulary, W target vocabulary, r Markov rank, d hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

GREEDY_BELOW = 1e-5
"""Temperatures below this take the arg-max."""

KINDS = ("none", "vanilla", "gated", "rnn")


class Head(NamedTuple):
    """Parameters of the Markov head and of the confidence head (DeepSpec's tensors)."""

    w1: Array | None  # [W, r], read by target id
    w2: Array | None  # [V, r], one row a draft-vocabulary token
    gate: Array | None = None  # [r, d + r]; its presence makes the head `gated`
    gate_bias: Array | None = None  # [r]
    joint: Array | None = None  # [3 r, 2 r + d]; its presence makes the head `rnn`
    joint_bias: Array | None = None  # [3 r]
    confidence: Array | None = None  # [1, d] or [1, d + r]
    confidence_bias: Array | None = None  # [1]

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        if self.w1 is None:
            return "none"
        return "gated" if self.gate is not None else "rnn" if self.joint is not None else "vanilla"


class Block(NamedTuple):
    """What the backbone hands to the head for one block of every row."""

    base: Array  # [G, B, V] logits before the head, any float type
    hidden: Array  # [G, B, d] backbone states
    anchor: Array  # [B] int32 target ids before the first place
    temperature: Array  # [B] float32
    word0: Array  # [G, B] uint32, the two words of each number's key
    word1: Array  # [G, B] uint32
    ids: Array | None  # [V] int32 target ids of the draft vocabulary; None: 0..V-1


class Sampled(NamedTuple):
    """One drafted block of every row. No ``[G, B, V]`` array is among it: ``row_log_q`` rebuilds one row where a
    verification needs it."""

    tokens: Array  # [G, B] int32 target ids
    column: Array  # [G, B] int32, the same as draft-vocabulary columns
    log_q: Array  # [G, B] float32: log-probability of the token under the distribution it was drawn from
    lse: Array  # [G, B] float32: log-sum-exp of logits / temperature (temperature 1 where greedy)
    z: Array | None  # [G, B, r] what W2 was multiplied by; None without a head
    confidence: Array | None  # [G, B] float32 logits; entry k never looks at token k


def scale(temperature: Array) -> tuple[Array, Array]:
    """``(1 / temperature, greedy)``, both ``[B]``; greedy rows have scale 1."""
    greedy = temperature < GREEDY_BELOW
    return 1.0 / jnp.where(greedy, 1.0, temperature).astype(jnp.float32), greedy


def markov_input(head: Head, state: Array, e: Array, hidden: Array) -> tuple[Array, Array]:
    """``(z [B, r], new state [B, r])`` from W1 of the token before ``e [B, r]`` and ``hidden [B, d]``."""
    kind = head.kind
    if kind == "vanilla":
        return e, state
    f32 = jnp.float32
    if kind == "gated":
        x = jnp.concatenate([hidden, e], axis=-1)
        gate = jnp.matmul(x, head.gate.T, preferred_element_type=f32) + head.gate_bias.astype(f32)[None]  # type: ignore[union-attr]
        return (jax.nn.sigmoid(gate) * e.astype(f32)).astype(e.dtype), state
    x = jnp.concatenate([state, e, hidden], axis=-1)
    joint = jnp.matmul(x, head.joint.T, preferred_element_type=f32) + head.joint_bias.astype(f32)[None]  # type: ignore[union-attr]
    gate, candidate, output = jnp.split(joint, 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    new = keep * state.astype(f32) + (1 - keep) * jnp.tanh(candidate)
    return jnp.tanh(output).astype(e.dtype), new.astype(state.dtype)


def confidence_logits(head: Head, hidden: Array, e: Array) -> Array | None:
    """``[G, B]`` float32 from ``hidden [G, B, d]`` and ``e [G, B, r]`` (r may be 0); None without the head."""
    if head.confidence is None:
        return None
    x = hidden
    if head.confidence.shape[1] > hidden.shape[-1]:
        x = jnp.concatenate([hidden, e], axis=-1)
    logits = jnp.einsum("gbx,x->gb", x, head.confidence[0], preferred_element_type=jnp.float32)
    return logits + head.confidence_bias.astype(jnp.float32)[None]  # type: ignore[union-attr]


def row_log_q(head: Head, base: Array, z: Array | None, lse: Array, temperature: Array) -> Array:
    """The whole distribution of single places, rebuilt: ``[B, V]`` log-probabilities.

    Args:
        base: ``[B, V]``, the place's base logits in each row. z: ``[B, r]``. lse, temperature: ``[B]``.
            Rows that are greedy get 0 at the first arg-max and -inf elsewhere.
    """
    logits = base.astype(jnp.float32)
    if z is not None:
        logits = logits + jnp.matmul(z, head.w2.T, preferred_element_type=jnp.float32)  # type: ignore[union-attr]
    inverse, greedy = scale(temperature)
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = columns == jnp.argmax(logits, axis=1, keepdims=True)
    return jnp.where(greedy[:, None], jnp.where(first, 0.0, -jnp.inf), logits * inverse[:, None] - lse[:, None])
