"""Markov heads (paper section 3.1): a low-rank bias on the draft logits from the token before.

Three forms, named as in DeepSpec's checkpoints. ``e = W1[prev]`` is read by target id; ``W2`` has one row for each
draft-vocabulary token. The released configurations put biases on the gate and joint projections where the paper
writes none; published weights must load, so they are here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.nn.linear import linear
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree, accumulate_dtype

KINDS = ("vanilla", "gated", "rnn")


def markov_specs(config: DrafterConfig, prefix: str = "markov_head.") -> PyTree:
    """Abstract parameters of the head."""
    d, r, v = config.decoder.hidden_size, config.markov_rank, config.decoder.vocab_size
    specs = {
        "w1": ParamSpec((v, r), ("lookup", "rank"), f"{prefix}markov_w1.weight"),
        "w2": ParamSpec((config.draft_vocab_size, r), ("vocab", "rank"), f"{prefix}markov_w2.weight"),
    }
    if config.markov_head == "gated":
        specs["gate"] = ParamSpec((r, d + r), ("rank", "embed"), f"{prefix}gate_proj.weight")
        specs["gate_bias"] = ParamSpec((r,), (None,), f"{prefix}gate_proj.bias", init="zeros")
    elif config.markov_head == "rnn":
        specs["joint"] = ParamSpec((3 * r, 2 * r + d), ("rank", "embed"), f"{prefix}joint_proj.weight")
        specs["joint_bias"] = ParamSpec((3 * r,), (None,), f"{prefix}joint_proj.bias", init="zeros")
    elif config.markov_head != "vanilla":
        raise ValueError(f"unknown Markov head {config.markov_head!r}; known: {', '.join(KINDS)}")
    return specs


def initial_state(config: DrafterConfig, rows: int, dtype: jnp.dtype) -> Array:
    """The recurrent state ``[R, r]`` at the start of every block (zeros; read by ``rnn`` only)."""
    return jnp.zeros((rows, config.markov_rank), dtype)


def markov_hidden(config: DrafterConfig, params: PyTree, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """The rank-r input of W2 at one position.

    Args:
        state: ``[R, r]``. e: ``[R, r]``, W1 of the token before. h: ``[R, d]``, the backbone's state here.

    Returns:
        ``(z [R, r], new state [R, r])``; the bias on the logits is ``W2 z``.
    """
    if config.markov_head == "vanilla":
        return e, state
    if config.markov_head == "gated":
        gate = linear(params["gate"], jnp.concatenate([h, e], axis=-1), params["gate_bias"])
        return jax.nn.sigmoid(gate) * e, state
    joint = linear(params["joint"], jnp.concatenate([state, e, h], axis=-1), params["joint_bias"])
    gate, candidate, output = jnp.split(joint, 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    # The output reads the joint projection of the old state, as the reference does.
    return jnp.tanh(output), keep * state + (1 - keep) * jnp.tanh(candidate)


def markov_bias(params: PyTree, z: Array) -> Array:
    """``W2 z``: ``[..., Vd]``, in float32 or wider."""
    return linear(params["w2"], z, out_dtype=accumulate_dtype(z.dtype), whole=True)


def teacher_forced(config: DrafterConfig, params: PyTree, previous: Array, hidden: Array) -> tuple[Array, Array]:
    """All positions at once, the tokens before them given.

    Args:
        previous: ``[N, K]`` target ids of the token before each position. hidden: ``[N, K, d]``.

    Returns:
        ``(z [N, K, r], e [N, K, r])``; the logits' bias is ``markov_bias(params, z)``.
    """
    e = params["w1"][previous]
    if config.markov_head != "rnn":
        z, _ = markov_hidden(config, params, e, e.reshape(-1, e.shape[-1]), hidden.reshape(-1, hidden.shape[-1]))
        return z.reshape(e.shape), e

    def step(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        z, state = markov_hidden(config, params, state, *inputs)
        return state, z

    start = initial_state(config, previous.shape[0], e.dtype)
    _, z = jax.lax.scan(step, start, (e.swapaxes(0, 1), hidden.swapaxes(0, 1)))
    return z.swapaxes(0, 1), e
