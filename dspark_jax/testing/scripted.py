"""Models that are tables: p and q are functions of the tokens before.

Their caches hold token ids, so that rollback as a length is really exercised: a wrong length reads a wrong history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState
from dspark_jax.drafters.base import Proposal, Sampler, base_row, drafts_of_block
from dspark_jax.layout import Layout
from dspark_jax.logit_rule import LogitRule
from dspark_jax.types import EMPTY, Array

_GARBAGE = -7
"""A cell that was never written, or lies beyond ``context``: whoever reads it gets NaN logits."""


def context_index(history: Array, vocab_size: int) -> Array:
    """Row of a table ``[(V + 1) ** order, ...]`` for the last ``order`` tokens ``history [..., order]``.

    V stands for "before the text began". A history that holds garbage gives -1.
    """
    base = vocab_size + 1
    place = base ** np.arange(history.shape[-1] - 1, -1, -1)
    index = sum(history[..., j] * int(place[j]) for j in range(history.shape[-1]))
    return jnp.where(jnp.any(history < 0, axis=-1), -1, index)


def _look_up(table: Array, index: Array) -> Array:
    """Rows ``index [N]`` of ``table [C, ...]``, NaN where the index is negative."""
    found = table[jnp.maximum(index, 0)]
    bad = (index < 0).reshape(index.shape + (1,) * (found.ndim - index.ndim))
    return jnp.where(bad, jnp.nan, found)


def _read(cells: Array, slot: Array, last: Array, order: int, vocab_size: int) -> Array:
    """``[N, order]``: the tokens at positions ``last - order + 1 .. last`` of slots ``slot [N]``."""
    position = last[:, None] - jnp.arange(order - 1, -1, -1)[None, :]
    found = cells.at[slot[:, None], jnp.maximum(position, 0)].get(mode="fill", fill_value=_GARBAGE)
    return jnp.where(position < 0, vocab_size, found)


def _write(cells: Array, new: Array, layout: Layout) -> Array:
    """Like ``kv_cache.write_rows``: places past a row's count are written too, as garbage."""
    slot = layout.first_slot + jnp.arange(layout.start.shape[0])
    position = layout.start[:, None] + jnp.arange(layout.width)[None, :]
    return cells.at[slot[:, None], position].set(layout.pad(new).astype(cells.dtype), mode="drop")


class ScriptedTarget(flax.struct.PyTreeNode):
    """A target whose next-token logits are a table of the last ``order`` tokens."""

    table: Array  # [(V + 1) ** order, V]
    order: int = flax.struct.field(pytree_node=False, default=1)
    max_positions: int = flax.struct.field(pytree_node=False, default=1 << 20)
    tokenizer: Any = flax.struct.field(pytree_node=False, default=None)
    name: str = flax.struct.field(pytree_node=False, default="scripted")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.table.shape[-1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the table."""
        return self.table.dtype

    def init_cache(self, slots: int, length: int) -> Array:
        """``[S, L]`` token ids; every cell is garbage."""
        return jnp.full((slots, length), _GARBAGE, jnp.int32)

    def forward(
        self,
        tokens: Array,
        layout: Layout,
        cache: Array,
        *,
        taps: tuple[int, ...] = (),
        context: int | None = None,
    ) -> tuple[Array, Array, Array]:
        """Logits ``[T, V]`` in place of final states, token ids ``[T, len(taps)]`` as features, the cache."""
        cache = _write(cache, tokens, layout)
        slot = layout.first_slot + layout.row
        history = _read(cache[:, :context], slot, layout.position, self.order, self.vocab_size)
        logits = _look_up(self.table, context_index(history, self.vocab_size))
        features = jnp.broadcast_to(tokens[:, None], (tokens.shape[0], len(taps))).astype(logits.dtype)
        return logits, features, cache

    def unembed(self, hidden: Array) -> Array:
        """The hidden states are the logits already."""
        return hidden


class ScriptedDrafter(flax.struct.PyTreeNode):
    """A drafter whose draft logits and confidences are tables of the last ``order`` tokens and of the place.

    ``peek``: the confidence of place k is read *behind* token k, so it looks at the drawn token. No real head may do
    that; adversarial tests do.
    """

    table: Array  # [G, (V + 1) ** order, Vd]
    confidence: Array | None = None  # [G, (V + 1) ** order] logits
    d2t: Array | None = None  # [Vd] target ids
    vocab_size: int = flax.struct.field(pytree_node=False, default=3)
    order: int = flax.struct.field(pytree_node=False, default=1)
    peek: bool = flax.struct.field(pytree_node=False, default=False)
    taps: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(0,))
    calibration: Any = None

    @property
    def block_size(self) -> int:
        """G."""
        return self.table.shape[0]

    @property
    def max_drafts(self) -> int:
        """G: the table knows no further place."""
        return self.table.shape[0]

    @property
    def lookback(self) -> int:
        """0: a cell is a token."""
        return 0

    @property
    def has_confidence(self) -> bool:
        """Proposals carry confidence logits."""
        return self.confidence is not None

    def init(self, slots: int, length: int) -> Array:
        """``[S, L]`` token ids absorbed so far; every cell is garbage."""
        return jnp.full((slots, length), _GARBAGE, jnp.int32)

    def absorb(self, state: Array, features: Array, layout: Layout, tokens: Array, kept: Array) -> Array:
        """Features are token ids (``ScriptedTarget.forward``)."""
        return _write(state, jnp.round(jnp.nan_to_num(features[:, 0], nan=_GARBAGE)), layout)

    def propose(
        self,
        state: Array,
        anchor: Array,
        length: Array,
        num_drafts: int,
        sampler: Sampler,
        context: int | None = None,
    ) -> Proposal:
        """One block for each of R rows; row r reads slot r."""
        rows = jnp.arange(anchor.shape[0])
        history = anchor[:, None]
        if self.order > 1:
            before = _read(state[:, :context], rows, length - 1, self.order - 1, self.vocab_size)
            history = jnp.concatenate([before, history], axis=1)
        rule, steps = sampler.start(), []  # type: ignore[var-annotated]
        for k in range(num_drafts):
            index = context_index(history, self.vocab_size)
            logits = _look_up(self.table[k], index)
            token, column, log_q, rule = sampler.draw(rule, logits, k)
            history = jnp.concatenate([history[:, 1:], token[:, None]], axis=1)
            at = context_index(history, self.vocab_size) if self.peek else index
            confidence = None if self.confidence is None else _look_up(self.confidence[k], at)
            steps.append((logits, token, column, log_q, confidence))
        base = jnp.stack([step[0] for step in steps])
        by_row = jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *(step[1:] for step in steps))
        token, column, log_q, confidence = by_row
        return Proposal(token, column, log_q, base, None, confidence)

    def row_logits(self, proposal: Proposal, place: Array) -> Array:
        """``[R, Vd]``: the table's logits that draft ``place [R]`` of each row was drawn from."""
        return base_row(proposal, place)


def open_slots(
    target: Any,
    drafter: Any,
    prompts: Array,
    *,
    max_new_tokens: int,
    seeds: Array | None = None,
    lengths: Array | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    coupled: bool = False,
    stop_token_ids: Sequence[int] = (),
    rule: LogitRule | None = None,
    rule_state: Any = None,
    num_drafts: int | None = None,
) -> DecodeState:
    """Slots that stand right before their first cycle: the anchor is the prompt's last token, all before is cached.

    Nothing is drawn. Args: ``prompts [B, P]``, ``lengths [B]`` (None: P), ``seeds [B]`` (None: 0..B-1), ``num_drafts``
    of the blocks to come (None: the drafter's own).
    """
    rows, longest = prompts.shape
    known = jnp.full(rows, longest, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    cells = longest + max_new_tokens + (0 if drafter is None else drafts_of_block(drafter, num_drafts)) + 1
    zeros = jnp.zeros(rows, jnp.int32)
    state = cycle.empty_rows(
        target,
        drafter,
        cells,
        jnp.arange(rows) if seeds is None else seeds,
        jnp.asarray(tuple(stop_token_ids) or (EMPTY,), jnp.int32),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        coupled=coupled,
        rule_state=rule_state,
    )
    static = cycle.Static(rule=rule)
    state, _ = cycle.prefill(target, drafter, state, prompts, known - 1, zeros > 0, static=static)
    anchor = jnp.take_along_axis(prompts, known[:, None] - 1, axis=1)[:, 0]
    return state.replace(anchor=anchor.astype(jnp.int32), active=zeros == 0)
