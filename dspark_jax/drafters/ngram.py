"""Corpus n-grams as a drafter: no weights, no features of the target; a baseline in the place of a trained one.

Each draft is drawn from the table's law behind the last two tokens (or the last one), and q is that law: exact under
both rules. With one successor a context (``successors`` 1) the drafts are certain and q is one-hot.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.ngrams import NgramConfig, NgramTables
from dspark_jax.drafters.base import Proposal, Sampler, base_row
from dspark_jax.layout import Layout
from dspark_jax.sampling import mask_beyond
from dspark_jax.types import Array, PyTree, accumulate_dtype

FLOOR = -60.0
"""Logit of a token that no table lists: e^-60 of probability, so that a logit rule may forbid all that are listed."""


class NgramDrafter(flax.struct.PyTreeNode):
    """Implements the contract of ``drafters/base.py``; a pytree of tables (``data.ngrams.NgramTables``)."""

    bigram: PyTree  # (ids [V, K] int32, log-probabilities [V, K])
    trigram: PyTree  # (first [V + 1], second [C], ids [C, K], log-probabilities [C, K]), or None
    config: NgramConfig = flax.struct.field(pytree_node=False)
    name: str = flax.struct.field(pytree_node=False)
    vocab_limit: int = flax.struct.field(pytree_node=False)
    halvings: int = flax.struct.field(pytree_node=False)  # of the search among the contexts of one token
    calibration: Any = None
    taps: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    max_drafts: int | None = flax.struct.field(pytree_node=False, default=None)
    has_confidence: bool = flax.struct.field(pytree_node=False, default=False)
    d2t: None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def build(
        cls,
        config: NgramConfig,
        tables: NgramTables,
        *,
        name: str = "",
        vocab_limit: int | None = None,
        dtype: Any = jnp.float32,
    ) -> NgramDrafter:
        """From counted tables.

        Args:
            vocab_limit: target ids at or beyond it are never drafted; None: no limit.
            dtype: of the logits, at least float32.
        """
        dtype, trigram, halvings = accumulate_dtype(dtype), None, 0
        if tables.first is not None and tables.second is not None:
            arrays = tables.first, tables.second, tables.trigram_ids
            trigram = (*map(jnp.asarray, arrays), jnp.asarray(tables.trigram_log_p, dtype))
            halvings = int(np.diff(tables.first).max(initial=0)).bit_length()
        bigram = jnp.asarray(tables.bigram_ids), jnp.asarray(tables.bigram_log_p, dtype)
        limit = config.vocab_size if vocab_limit is None else vocab_limit
        return cls(bigram, trigram, config, name, limit, halvings)

    @property
    def block_size(self) -> int:
        """G, drafts of a block where nobody says how many; any number can be made."""
        return self.config.block_size

    def init(self, slots: int, length: int) -> Array:
        """``[S]``: the last verified token of each slot, in front of the anchor."""
        return jnp.zeros(slots, jnp.int32)

    def absorb(self, state: Array, features: Array, layout: Layout, tokens: Array, kept: Array) -> Array:
        """Remembers the last token that stays."""
        rows = kept.shape[0]
        old = jax.lax.dynamic_slice_in_dim(state, layout.first_slot, rows, 0)
        last = tokens[layout.index[jnp.arange(rows), jnp.maximum(kept - 1, 0)]]
        new = jnp.where(kept > 0, last, old).astype(state.dtype)
        return jax.lax.dynamic_update_slice_in_dim(state, new, layout.first_slot, 0)

    def propose(
        self,
        state: Array,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> Proposal:
        """Drafts ``num_drafts`` (static, any number) tokens for each of R rows; row r reads slot r."""
        before, token = state[: anchor.shape[0]], anchor
        rule, steps = sampler.start(), []
        with jax.named_scope("draft_ngram"):
            for k in range(num_drafts):
                logits = self.logits(before, token)
                drafted, index, log_q, rule = sampler.draw(rule, logits, k)
                before, token = token, drafted
                steps.append((logits, drafted, index, log_q))
        base, *by_row = zip(*steps, strict=True)
        tokens, index, log_q = (jnp.stack(column, axis=1) for column in by_row)
        return Proposal(tokens, index, log_q, jnp.stack(base))

    @property
    def lookback(self) -> int:
        """The token before the anchor is what it remembers of a slot."""
        return 1

    def row_logits(self, proposal: Proposal, place: Array) -> Array:
        """``[R, V]``: the logits that draft ``place [R]`` of each row was drawn from."""
        return base_row(proposal, place)

    def logits(self, before: Array, token: Array) -> Array:
        """``[R, V]`` behind the tokens ``before [R]`` and ``token [R]``: the trigram's law where its context is known,
        else the bigram's; ``FLOOR`` for what is not among the K likeliest."""
        ids, log_p = (table[token] for table in self.bigram)
        if self.trigram is not None and self.halvings:
            first, second, *laws = self.trigram
            at = self._find(first[before], first[before + 1], token, second)
            known = (at < first[before + 1]) & (second[jnp.minimum(at, second.shape[0] - 1)] == token)
            mine = (table[jnp.minimum(at, second.shape[0] - 1)] for table in laws)
            ids, log_p = (jnp.where(known[:, None], a, b) for a, b in zip(mine, (ids, log_p), strict=True))
        rows = jnp.arange(token.shape[0])[:, None]
        whole = jnp.full((token.shape[0], self.config.vocab_size), FLOOR, log_p.dtype)
        return mask_beyond(whole.at[rows, ids].max(log_p), None, self.vocab_limit)

    def _find(self, low: Array, high: Array, token: Array, second: Array) -> Array:
        """``[R]`` the first place in ``low..high`` whose entry of ``second`` is not below ``token``; high: none."""
        for _ in range(self.halvings):
            middle = jnp.minimum((low + high) // 2, second.shape[0] - 1)
            below = (second[middle] < token) & (low < high)
            low, high = jnp.where(below, middle + 1, low), jnp.where(below, high, jnp.where(low < high, middle, high))
        return low
