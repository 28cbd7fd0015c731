"""What tests and experiments need to drive decoding without a real model.

``ScriptedTarget`` and ``ScriptedDrafter`` implement the protocols of ``cycle.py`` with tables: p and q are functions
of the tokens before. Their caches hold token ids, so that rollback as a length is really exercised: a wrong length
reads a wrong history. ``Tape`` is a noise that walks every branch of a computation, one branch a row, and keeps the
branch's exact probability. ``tiny_target`` and ``tiny_drafter`` are transformers small enough for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, Sampling
from dspark_jax.cycle import DecodeState
from dspark_jax.drafters.base import Proposal, Sampler, base_row, drafts_of_block
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.layout import Layout
from dspark_jax.logit_rule import LogitRule
from dspark_jax.noise import PLAIN, NoiseKey
from dspark_jax.params import init
from dspark_jax.sampling import sampling_rows
from dspark_jax.targets import Target, decoder_specs
from dspark_jax.types import EMPTY, Array, concrete

Result = TypeVar("Result")

_GARBAGE = -7
"""A cell that was never written, or lies beyond ``context``: whoever reads it gets NaN logits."""


# ---- scripted models -----------------------------------------------------------------------------------------


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
    stop = jnp.asarray(tuple(stop_token_ids) or (EMPTY,), jnp.int32)
    state = DecodeState(
        length=zeros,
        anchor=zeros,
        active=zeros > 0,
        seed=(jnp.arange(rows) if seeds is None else seeds).astype(jnp.uint32),
        cycle=zeros,
        coupled=jnp.full(rows, coupled),
        remaining=zeros + max_new_tokens,
        stop_ids=jnp.broadcast_to(stop[None, :], (rows, stop.shape[0])),
        sampling=sampling_rows(sampling, rows),
        rule=rule_state,
        target=target.init_cache(rows, cells),
        draft=None if drafter is None else drafter.init(rows, cells),
    )
    static = cycle.Static(rule=rule)
    state, _ = cycle.prefill(target, drafter, state, prompts, known - 1, zeros > 0, static=static)
    anchor = jnp.take_along_axis(prompts, known[:, None] - 1, axis=1)[:, 0]
    return state.replace(anchor=anchor.astype(jnp.int32), active=zeros == 0)


# ---- noise ---------------------------------------------------------------------------------------------------


class Tape:
    """Noise that walks every branch, one branch a world; a world is ``group`` neighbouring rows.

    Every draw of every row of a world is a digit of the world's number, so the worlds together are all combinations
    of outcomes, and ``weight`` is each one's exact probability. Runs outside of a trace only. Use ``enumerate_worlds``.
    """

    def __init__(self, arities: list[int] | None, group: int = 1, at_least: int = 1) -> None:
        self.group = group
        self.recording = arities is None
        self.arities: list[int] = [] if arities is None else arities
        self.calls = 0
        combinations = 1 if arities is None else math.prod(arities)
        self.worlds = max(combinations, at_least)
        self.rows = self.worlds * group
        self.log_probs: list[Array] = []  # [rows, V], of every categorical draw in order
        self.picks: list[np.ndarray] = []  # [rows], of every pick in order
        self._weight = (np.arange(self.worlds) < combinations).astype(np.float64)

    def _digits(self, arity: int) -> np.ndarray:
        """``[rows]`` the outcome of this draw in every row."""
        columns = []
        for _ in range(self.group):
            if self.recording:
                self.arities.append(arity)
            if self.calls >= len(self.arities) or self.arities[self.calls] != arity:
                raise RuntimeError(f"draw {self.calls} has {arity} outcomes, announced were {self.arities}")
            below = 1 if self.recording else math.prod(self.arities[self.calls + 1 :])
            columns.append(np.arange(self.worlds) // below % (1 if self.recording else arity))
            self.calls += 1
        return np.stack(columns, axis=1).reshape(-1)

    def _multiply(self, probability: np.ndarray) -> None:
        factor = probability.reshape(self.worlds, self.group).prod(axis=1)
        # A world that has probability 0 already may compute nonsense from there on.
        self._weight = np.where(self._weight == 0.0, 0.0, self._weight * factor)

    @property
    def weight(self) -> np.ndarray:
        """``[worlds]`` float64 probabilities; they sum to the number of scenarios (see ``pick``)."""
        if np.isnan(self._weight).any():
            raise RuntimeError("a possible world met a NaN probability")
        return self._weight

    def pick(self, options: int) -> np.ndarray:
        """``[rows]`` a choice of the test's own (not a draw): every option is a scenario of weight 1. The rows of a
        world choose independently."""
        self.picks.append(self._digits(options))
        return self.picks[-1]

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """See ``noise.Noise``."""
        fixed = np.asarray(_known(greedy))
        best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        if fixed.all():
            return best
        if log_probs.shape[0] != self.rows:
            raise RuntimeError(f"{log_probs.shape[0]} rows are drawn for, the tape has {self.rows}")
        index = np.where(fixed, np.asarray(best), self._digits(log_probs.shape[-1]))
        self.log_probs.append(log_probs)
        normal = np.asarray(jax.nn.log_softmax(log_probs, axis=-1))[np.arange(self.rows), index]
        self._multiply(np.where(fixed, 1.0, np.exp(normal)))
        return jnp.asarray(index, jnp.int32)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """See ``noise.Noise``."""
        yes = self._digits(2) == 1
        p = np.clip(np.asarray(_known(prob)), 0.0, 1.0)
        self._multiply(np.where(yes, p, 1.0 - p))
        return jnp.asarray(yes)


def _known(x: Array) -> np.ndarray:
    known = concrete(x)
    if known is None:
        raise RuntimeError("a tape runs outside of a trace only")
    return known


def enumerate_worlds(
    run: Callable[[Tape], Result], group: int = 1, arities: Sequence[int] | None = None, at_least: int = 1
) -> tuple[Tape, Result]:
    """Runs ``run(tape)`` on ``tape.rows`` rows, so that every combination of outcomes is one world.

    ``arities`` are the numbers of outcomes of every draw, in order; None: ``run`` is first called on a single world
    to count them. The number of draws must not depend on their outcomes. Worlds of weight 0 are added up to
    ``at_least``, so that cases of different size share their compiled operations.
    """
    if arities is None:
        probe = Tape(None, group)
        run(probe)
        arities = probe.arities
    tape = Tape(list(arities), group, at_least)
    result = run(tape)
    if tape.calls != len(tape.arities):
        raise RuntimeError(f"{len(tape.arities)} draws were announced, {tape.calls} made")
    return tape, result


class GumbelTable:
    """Noise read from ``values [tapes, positions, V]``: the row's seed names its tape.

    For ``coupled`` and plain decoding only: a draw with another key gives the index -1, an acceptance number False.
    """

    def __init__(self, values: Array) -> None:
        self.values = values

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """See ``noise.Noise``."""
        g = self.values[key.seed.astype(jnp.int32), key.counter]
        g = g if ids is None else g[:, ids]
        index = jnp.argmax(log_probs + jnp.where(greedy[:, None], 0.0, g), axis=-1)
        return jnp.where(greedy | (key.purpose == PLAIN), index, -1).astype(jnp.int32)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """See ``noise.Noise``."""
        return jnp.zeros(prob.shape, bool)


# ---- tiny transformers ---------------------------------------------------------------------------------------


def tiny_target(
    family: str = "qwen3",
    *,
    seed: int = 0,
    vocab_size: int = 32,
    hidden_size: int = 16,
    num_layers: int = 3,
    head_dim: int = 8,
    dtype: Any = jnp.float32,
    tie_embeddings: bool = False,
    max_positions: int = 256,
    scan: bool | None = None,
) -> Target:
    """A random target, mostly a bigram model (its layers are scaled down), so that a drafter can do well on it."""
    layer = LayerConfig(num_kv_heads=2, head_dim=head_dim, rope=RopeConfig())
    config = DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_heads=4,
        layers=(layer,) * num_layers,
        qk_norm=family == "qwen3",
        tie_embeddings=tie_embeddings,
        max_positions=max_positions,
    )
    params = _scaled(init(decoder_specs(config), jax.random.key(seed), dtype), 0.3)
    params["embed_tokens"] = params["embed_tokens"] * 50.0  # standard deviation 1
    if not tie_embeddings:
        params["lm_head"] = params["lm_head"] * 30.0
    return Target.build(params, config, name=f"tiny-{family}", scan=scan)


def tiny_drafter(
    target: Target,
    *,
    head: str = "vanilla",
    seed: int = 1,
    block_size: int = 4,
    num_layers: int = 1,
    confidence: bool | None = None,
    draft_vocab_size: int = 0,
    target_layer_ids: tuple[int, ...] = (0, 1),
    **config: Any,
) -> Drafter:
    """A random drafter for a tiny target.

    Args:
        head: vanilla | gated | rnn | none (DFlash). confidence: None: with any Markov head.
        draft_vocab_size: Vd of a trimmed vocabulary (every second token first), 0 for the whole one.
        config: further fields of ``DrafterConfig``.
    """
    decoder, params = target.config, target.params
    table = params["embed_tokens"]
    output = table if decoder.tie_embeddings else params["lm_head"]
    backbone = replace(decoder, layers=decoder.layers[:1] * num_layers, tie_embeddings=False)
    rank = 0 if head == "none" else decoder.hidden_size
    trimmed = draft_vocab_size > 0
    drafter_config = DrafterConfig(
        method="dflash" if head == "none" else "dspark",
        decoder=backbone,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        mask_token_id=decoder.vocab_size - 1,
        num_target_layers=decoder.num_layers,
        markov_rank=rank,
        markov_head=head if rank else "vanilla",
        confidence_head=bool(rank) if confidence is None else confidence,
        confidence_with_markov=bool(rank),
        draft_vocab_size=draft_vocab_size,
        trimmed=trimmed,
        **config,
    )
    d2t = None
    if trimmed:
        order = np.argsort(np.arange(decoder.vocab_size) % 2, kind="stable")
        d2t = jnp.asarray(np.sort(order[:draft_vocab_size]), jnp.int32)
        output = output[d2t]
    drafter = Drafter.random(drafter_config, jax.random.key(seed), embed=table, head=output, d2t=d2t)
    drafter_params = _scaled(drafter.params, 0.3)
    if rank:
        # The bias W2 W1[prev] is then close to the bigram part of the target's logits.
        noise = jax.random.normal(jax.random.key(seed + 1), output.shape, jnp.float32).astype(output.dtype)
        drafter_params["markov"] = {**drafter.params["markov"], "w1": table, "w2": output + 0.1 * noise}
    if drafter_config.confidence_head:
        proj = drafter.params["confidence"]["proj"] * 50.0
        drafter_params["confidence"] = {**drafter.params["confidence"], "proj": proj}
    return drafter.replace(params=drafter_params)


def _scaled(params: Any, factor: float) -> Any:
    """The tree with what each branch adds to the residual stream scaled."""

    def scale(path: Any, value: Array) -> Array:
        name = getattr(path[-1], "key", "")
        return value * factor if name in ("o_proj", "down_proj") else value

    return jax.tree_util.tree_map_with_path(scale, params)
