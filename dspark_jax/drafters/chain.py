"""Drafters that draft one token after the other: the half that EAGLE-3 and MTP share.

A chain works on pairs: a hidden state of position i - 1 and the token at position i together give the state of
position i, whose logits draft the token at i + 1, which makes the next pair, and so on. For verified positions the
hidden state comes from the target (``condense``), behind them from the chain's own step before. There is one layer
and its keys and values need the pairs alone, so absorbing is a projection, never an attention.

The pair of token position c lies in cell c and has rotary position c - 1, that of its hidden state, as in the
reference. Cell 0 stays garbage, since no state precedes the first token. The newest verified state still waits for
its partner, the anchor: it is kept apart. The block's own pairs are never written to the cache, so that rejecting
drafts is a length and a choice among the states just verified.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.drafters.base import Proposal, Sampler
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.drafters.loaded import LoadedDrafter
from dspark_jax.kv_cache import KVCache, init_cache, read_rows, storable, write_rows
from dspark_jax.layout import Layout, dense_layout
from dspark_jax.nn.attention import KeyBlock, attention, causal_visible, context_visible
from dspark_jax.nn.block import attention_scale, keys_values, layer_forward
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import rope_tables
from dspark_jax.sampling import mask_beyond
from dspark_jax.types import Array, accumulate_dtype


class ChainState(flax.struct.PyTreeNode):
    """Keys and values of the verified pairs, and the state that waits. Cells at positions >= length are garbage."""

    cache: KVCache  # cell c: the pair of token position c
    hidden: Array  # [S, d]: condensed target state of the last verified position


class ChainDrafter(LoadedDrafter):
    """The contract of ``drafters/base.py`` on top of three functions that make a kind of chain."""

    # What a kind defines

    def condense(self, features: Array) -> Array:
        """Tapped target states ``[T, m * d]`` to the hidden states ``[T, d]`` that start a chain."""
        raise NotImplementedError

    def join(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """The pairs ``[T, d]``, ``[T, d]`` as the layer takes them: (residual stream ``[T, d]``, what the
        attention reads)."""
        raise NotImplementedError

    def carry(self, state: Array, normed: Array) -> Array:
        """The hidden state of the next pair, from the layer's output ``[R, d]`` before and after the last norm."""
        return state

    # The contract

    @property
    def max_drafts(self) -> int | None:
        """A chain may be of any length."""
        return None

    @property
    def lookback(self) -> int:
        """1: the next pair needs the state of the token before it."""
        return 1

    def init(self, slots: int, length: int) -> ChainState:
        """An empty cache."""
        dtype = self.shared.embed.dtype
        hidden = jnp.zeros((slots, self.config.decoder.hidden_size), dtype)
        return ChainState(init_cache(self.config.decoder.layers, slots, length, dtype), hidden)

    def absorb(self, state: ChainState, features: Array, layout: Layout, tokens: Array, kept: Array) -> ChainState:
        """Writes the pair of every token of the forward; what was rejected is overwritten later.

        The first token of a row pairs with the state that waited, each other with the state before it in the row.
        """
        decoder, (layer,) = self.config.decoder, self.config.decoder.layers
        with jax.named_scope("absorb"):
            hidden = self.condense(features).astype(state.hidden.dtype)
            rows = kept.shape[0]
            waiting = jax.lax.dynamic_slice_in_dim(state.hidden, layout.first_slot, rows, 0)
            before = jnp.where((layout.offset == 0)[:, None], waiting[layout.row], jnp.roll(hidden, 1, axis=0))
            _, inputs = self.join(before, self.embed(tokens))
            tables = rope_tables(layer.rope, layer.head_dim, layout.position - 1, accumulate_dtype(inputs.dtype))
            k, v = storable(*keys_values(decoder, layer, self.params["layers"][0]["attn"], inputs, tables))
            keys = write_rows(state.cache.k[0], layout.pad(k).swapaxes(1, 2), layout)
            values = write_rows(state.cache.v[0], layout.pad(v).swapaxes(1, 2), layout)
            last = layout.index[jnp.arange(rows), jnp.maximum(kept - 1, 0)]
            waiting = jnp.where((kept > 0)[:, None], hidden[last], waiting)
            new = jax.lax.dynamic_update_slice_in_dim(state.hidden, waiting, layout.first_slot, 0)
        return ChainState(KVCache((keys,), (values,)), new)

    def propose(
        self,
        state: ChainState,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> Proposal:
        """Drafts ``num_drafts`` (static, any number) tokens for each of R rows; row r reads slot r.

        Args:
            anchor: ``[R]`` last committed tokens, at positions ``length [R]``.
        """
        return self.walk(state, anchor, length, num_drafts, sampler, context)[0]

    def walk(
        self,
        state: ChainState,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> tuple[Proposal, Array]:
        """``propose``, and the states ``[R, G, d]`` before the last norm from which the tokens were drawn."""
        decoder, (layer,) = self.config.decoder, self.config.decoder.layers
        rows, eps = anchor.shape[0], decoder.rms_norm_eps
        context = state.cache.length if context is None else min(context, state.cache.length)
        layout = dense_layout(length, jnp.ones_like(length), 1)
        seen_k, seen_v = (read_rows(cells[0], layout, context) for cells in (state.cache.k, state.cache.v))
        seen = context_visible(length, num_drafts, context, layer.window) & (jnp.arange(context) > 0)[None, None, :]
        own_seen = causal_visible(jnp.zeros_like(length), num_drafts, num_drafts, layer.window)

        def step(carry, inputs):  # type: ignore[no-untyped-def]
            token, hidden, own_k, own_v, rule = carry
            k, seen_step, own_step = inputs
            tables = rope_tables(layer.rope, layer.head_dim, length - 1 + k, accumulate_dtype(hidden.dtype))

            def attend(q, key, value):  # type: ignore[no-untyped-def]
                new_k, new_v = (
                    jax.lax.dynamic_update_slice_in_dim(cells, new[:, :, None].astype(cells.dtype), k, axis=2)
                    for cells, new in ((own_k, key), (own_v, value))
                )
                blocks = [KeyBlock(seen_k, seen_v, seen_step[:, None]), KeyBlock(new_k, new_v, own_step[:, None])]
                return attention(q[:, None], blocks, attention_scale(decoder, layer))[:, 0], (new_k, new_v)

            residual, read = self.join(hidden, self.embed(token))
            out, (own_k, own_v) = layer_forward(
                decoder, layer, self.params["layers"][0], residual, tables, attend, inputs=read
            )
            normed = rms_norm(out, self.params["norm"], eps)
            logits = mask_beyond(base_logits(self.config, self.shared, normed), self.d2t, self.vocab_limit)
            token, index, log_q, rule = sampler.draw(rule, logits, k)
            carry = (token, self.carry(out, normed).astype(hidden.dtype), own_k, own_v, rule)
            return carry, (logits, token, index, log_q, out)

        own = jnp.zeros((rows, layer.num_kv_heads, num_drafts, layer.head_dim), seen_k.dtype)
        start = (anchor, state.hidden[:rows], own, own, sampler.start())
        steps = (jnp.arange(num_drafts), seen.swapaxes(0, 1), own_seen.swapaxes(0, 1))
        unroll = num_drafts if jax.default_backend() == "cpu" else 1
        with jax.named_scope("draft_chain"):
            _, outputs = jax.lax.scan(step, start, steps, unroll=unroll)
        logits, *by_row = outputs
        tokens, index, log_q, states = (a.swapaxes(0, 1) for a in by_row)
        return Proposal(tokens, index, log_q, logits), states

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[..., d]``, scaled where the family does so."""
        x = self.shared.embed[tokens]
        scale = self.config.decoder.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)
