"""The teacher-forced forward of chains (EAGLE-3, MTP): training-time test (Li et al., arXiv:2503.01840, section 3.2).

Step k of a chain pairs the chain's own state of step k - 1 with the text's next token; only step 0 reads the target's
state. The keys and values of the steps before are kept, so that a chain attends to the target-conditioned pairs up to
its anchor's and to its own drafted pairs, each on the diagonal: exactly what decoding attends to, along the text.

A sequence's A chains are independent queries against one set of context keys: memory and cost go with A x L, and what
a chain sees of the context is the same comparison at every step. Letters as in ``data/packing.py``; column i is the
pair of the target's state of position i and the token at i + 1, so the chain of anchor a begins at column a - 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots
from dspark_jax.drafters import KINDS
from dspark_jax.drafters.base import SharedParams
from dspark_jax.nn.block import attention_scale, keys_values, layer_forward
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import rope_tables
from dspark_jax.train.context_attention import context_attention
from dspark_jax.types import Array, PyTree, accumulate_dtype


def step_tokens(tokens: Array, anchors: Array, steps: int) -> Array:
    """``[B, A, K]``: what each step is fed, the text from the anchor on; token 0 behind its end."""
    at = anchors[:, :, None] + jnp.arange(steps)[None, None, :]
    return tokens.at[jnp.arange(tokens.shape[0])[:, None, None], at].get(mode="fill", fill_value=0)


def chain_states(
    config: DrafterConfig,
    params: PyTree,
    shared: SharedParams,
    features: Array,
    tokens: Array,
    anchors: Array,
    steps: int,
    live: Array | None = None,
) -> Array:
    """States ``[B, A, K, d]`` before the last norm of the chains behind ``anchors [B, A]``, ``steps`` long.

    Args:
        features: ``[B, L, m * d]`` tapped target states of whole sequences. tokens: ``[B, L]``.
        anchors: positions from 1 on (no state precedes the first token; 0 counts as 1).
        live: ``[B, A, K]`` bool, None for all: other steps attend to nothing.
    """
    # The kind's own functions on the parameters that are being trained.
    chain: Any = KINDS[config.method](params, shared, None, config, "", config.decoder.vocab_size)
    decoder, (layer,) = config.decoder, config.decoder.layers
    weights, (batch, length, _), count = params["layers"][0], features.shape, anchors.shape[1]
    wide = accumulate_dtype(features.dtype)
    with jax.named_scope("chain_context"):
        hidden, context_k, context_v = _context(chain, features, tokens)
    column = jnp.maximum(anchors - 1, 0)
    at, scale = jnp.arange(steps), attention_scale(decoder, layer)

    def step(carry: Any, inputs: Any) -> tuple[Any, Array]:
        state, own_k, own_v = carry
        k, fed, attends = inputs
        seen = _context_seen(column, k, length, layer.window)
        # Place j holds the pair of step j; that of step 0 is the last of the context already.
        own_seen = (at > 0) & (at <= k) & ((at > k - layer.window) if layer.window else True)

        def attend(q, key, value):  # type: ignore[no-untyped-def]
            q, key, value = (x.reshape(batch, count, *x.shape[1:]) for x in (q, key, value))
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(cells, new[:, :, None], k, axis=2)
                for cells, new in ((own_k, key), (own_v, value))
            )
            out = context_attention(q, (context_k, context_v, seen), (keys, values, own_seen[None]), scale)
            if attends is not None:
                out = jnp.where(attends[..., None, None], out, 0)
            return out.reshape(batch * count, *out.shape[2:]), (keys, values)

        tables = rope_tables(layer.rope, layer.head_dim, (column + k).reshape(-1), wide)
        residual, read = chain.join(state, chain.embed(fed.reshape(-1)))
        out, own = layer_forward(decoder, layer, weights, residual, tables, attend, inputs=read)
        normed = rms_norm(out, params["norm"], decoder.rms_norm_eps)
        return (chain.carry(out, normed).astype(state.dtype), *own), out

    first = hidden[jnp.arange(batch)[:, None], column].reshape(batch * count, -1)
    own = jnp.zeros((batch, count, steps, *context_k.shape[2:]), context_k.dtype)
    fed, attends = (None if x is None else jnp.moveaxis(x, 2, 0) for x in (step_tokens(tokens, anchors, steps), live))
    with jax.named_scope("chain_steps"):
        _, states = jax.lax.scan(step, (first, own, own), (at, fed, attends))
    return jnp.moveaxis(states.reshape(steps, batch, count, -1), 0, 2)


def chain_hidden(
    config: DrafterConfig,
    params: PyTree,
    shared: SharedParams,
    features: Array,
    tokens: Array,
    plan: BlockPlan,
    slots: Slots,
) -> Array:
    """States ``[B, T, d]`` after the last norm; a block of width w is a chain of w steps."""
    states = chain_states(config, params, shared, features, tokens, slots.anchors, plan.widest)
    if plan.slots == plan.anchors * plan.widest:
        flat = states.reshape(states.shape[0], plan.slots, -1)
    else:
        flat = states[:, plan.block, plan.offset]
    return rms_norm(flat, params["norm"], config.decoder.rms_norm_eps)


def _context(chain: Any, features: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Condensed states ``[B, L, d]``, and keys and values ``[B, L, Hk, D]`` of every column (the last one has token 0
    for its partner, and is seen by no chain of the text)."""
    decoder, (layer,) = chain.config.decoder, chain.config.decoder.layers
    batch, length, _ = features.shape
    # Features may be narrower than the parameters that are trained.
    hidden = chain.condense(features.reshape(batch * length, -1)).astype(chain.params["norm"].dtype)
    successor = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    _, read = chain.join(hidden, chain.embed(successor.reshape(-1)))
    position = jnp.tile(jnp.arange(length), batch)
    tables = rope_tables(layer.rope, layer.head_dim, position, accumulate_dtype(features.dtype))
    pair = keys_values(decoder, layer, chain.params["layers"][0]["attn"], read, tables)
    k, v = (x.reshape(batch, length, *x.shape[1:]) for x in pair)
    return hidden.reshape(batch, length, -1), k, v


def _context_seen(column: Array, step: Array, length: int, window: int) -> Array:
    """``[B, A, L]``: the pairs up to the chain's first column, within the window of the step's position."""
    key = jnp.arange(length)[None, None, :]
    seen = key <= column[:, :, None]
    if window:
        seen &= key > column[:, :, None] + step - window
    return seen
