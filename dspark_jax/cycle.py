"""One decoding cycle: draft -> admit -> verify -> accept -> absorb, as pure functions over state pytrees.

``generate()`` drives it inside ``lax.while_loop``; the serving engine drives it from the host, one jitted program a
bucket. Targets, drafters and noise are arguments, so scripted ones drive the same code in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import Sampling
from dspark_jax.cycle_draws import DraftSampler, Static, decide, judge, target_law
from dspark_jax.drafters.base import DrafterModel, Proposal
from dspark_jax.kv_cache import write_rows
from dspark_jax.layout import Layout, dense_layout, ragged_layout
from dspark_jax.noise import NoiseKey
from dspark_jax.sampling import SamplingRows, log_probs, sampling_rows
from dspark_jax.types import Array, PyTree
from dspark_jax.verify import Commit, Verdict, commit


class TargetModel(Protocol):
    """What a cycle needs of a target; ``testing.ScriptedTarget`` implements it without a transformer."""

    @property
    def max_positions(self) -> int: ...

    def init_cache(self, slots: int, length: int) -> Any: ...

    def forward(
        self, tokens: Array, layout: Layout, cache: Any, *, taps: tuple[int, ...], context: int | None
    ) -> tuple[Array, Array, Any]: ...

    def unembed(self, hidden: Array) -> Array: ...


class Ring(flax.struct.PyTreeNode):
    """Tokens of cycles without drafts, and their tapped states: a drafter that is not asked does not work. They are
    absorbed in one go when drafting resumes. Who drives the cycle counts how many of a slot's N places are taken."""

    features: Array  # [S, 1, N, m * d]
    tokens: Array  # [S, 1, N, 1] int32


class DecodeState(flax.struct.PyTreeNode):
    """Everything that decoding remembers of its slots. Invariant: the anchor sits at position ``length``, in no
    cache yet."""

    length: Array  # [S] int32: cached tokens
    anchor: Array  # [S] int32: last committed token
    active: Array  # [S] bool
    seed: Array  # [S] uint32
    cycle: Array  # [S] int32: the request's own cycle number, raised by every cycle that works for it
    coupled: Array  # [S] bool: verification rule of the request
    remaining: Array  # [S] int32: tokens it may still emit
    stop_ids: Array  # [S, N] int32, EMPTY where unused
    sampling: SamplingRows  # [S] each
    rule: PyTree  # state of the logit rule, rows first; None without one
    target: Any  # target cache
    draft: Any  # drafter state, None without a drafter
    ring: Any = None  # Ring, None where every cycle absorbs at once

    def small(self) -> DecodeState:
        """The arrays of one entry a slot, without the caches."""
        return self.replace(target=None, draft=None, ring=None)

    def with_caches(self, other: DecodeState) -> DecodeState:
        """These small arrays, and the caches of ``other``."""
        return self.replace(target=other.target, draft=other.draft, ring=other.ring)


def empty_rows(
    target: TargetModel,
    drafter: DrafterModel | None,
    cells: int,
    seeds: Array,
    stop_ids: Array,
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling],
    coupled: bool,
    rule_state: PyTree = None,
) -> DecodeState:
    """Idle slots with empty caches of ``cells``, one for each of ``seeds [B]``. ``stop_ids [N]`` are everybody's."""
    rows = seeds.shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    return DecodeState(
        length=zeros,
        anchor=zeros,
        active=jnp.zeros(rows, bool),
        seed=seeds.astype(jnp.uint32),
        cycle=zeros,
        coupled=jnp.full(rows, coupled),
        remaining=zeros + max_new_tokens,
        stop_ids=jnp.broadcast_to(stop_ids[None, :], (rows, stop_ids.shape[0])),
        sampling=sampling_rows(sampling, rows),
        rule=rule_state,
        target=target.init_cache(rows, cells),
        draft=None if drafter is None else drafter.init(rows, cells),
    )


def _take(state: DecodeState, rows: int) -> DecodeState:
    """The small arrays of the lowest ``rows`` slots; caches are left whole (a slice would copy them)."""
    return jax.tree.map(lambda a: a[:rows], state.small())


def draft(
    drafter: DrafterModel,
    state: DecodeState,
    *,
    num_drafts: int,
    rows: int | None = None,
    context: int | None = None,
    static: Static = Static(),  # noqa: B008 - frozen
) -> Proposal:
    """Drafts a block for the lowest ``rows`` slots (static; None: all), idle ones included.

    Cells of the context cache beyond ``context`` (static; None: all) are not read.
    """
    rows = state.length.shape[0] if rows is None else rows
    view = _take(state, rows)
    sampler = DraftSampler(view, drafter, static)
    return drafter.propose(state.draft, view.anchor, view.length, num_drafts, sampler, context)


def window_limit(state: DecodeState, max_positions: int, rows: int | None = None) -> Array:
    """``[R]``: drafts that fit before the end of the context window; the only reason to shorten a block."""
    length = state.length if rows is None else state.length[:rows]
    return jnp.maximum(max_positions - 1 - length, 0)


def step(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    proposal: Proposal | None,
    admitted: Array | None,
    *,
    rows: int | None = None,
    width: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    held: Array | None = None,
    static: Static = Static(),  # noqa: B008 - frozen
) -> tuple[DecodeState, Commit]:
    """Verifies the admitted drafts, accepts, commits and absorbs: the second half of a cycle.

    Args:
        proposal: None decodes one token for every active row.
        admitted: ``[R]`` drafts offered by each row.
        rows: the lowest slots that take part (static; None: all).
        width: largest block + 1 (static; None: all drafts of the proposal + 1).
        tokens: flat tokens T of the target's forward (static; None: rows * width, no flattening).
            ``sum(active * (1 + admitted)) <= tokens`` is the caller's duty.
        context: cells of the caches to attend to (static; None: all).
        held: ``[R]`` tokens of each row that wait in the ring; without a proposal the cycle's own token joins them
            there, and the drafter does nothing. None: it absorbs at once.
    """
    options: dict[str, Any] = {"rows": rows, "width": width, "tokens": tokens, "context": context, "held": held}
    state, result, _, _ = _step(target, drafter, state, proposal, admitted, static=static, law=False, **options)
    return state, result


def step_with_law(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    proposal: Proposal | None,
    admitted: Array | None,
    *,
    static: Static = Static(),  # noqa: B008 - frozen
    **options: Any,
) -> tuple[DecodeState, Commit, Array, Layout]:
    """``step``, and what it compared the drafts with: log-probabilities ``[T, V]`` of the target's sampled distribution
    at every flat token, and their layout. For measurements; it draws the plain way on every device."""
    state, result, log_p, layout = _step(target, drafter, state, proposal, admitted, static=static, law=True, **options)
    return state, result, log_p, layout  # type: ignore[return-value]


def _step(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    proposal: Proposal | None,
    admitted: Array | None,
    *,
    static: Static,
    law: bool,
    rows: int | None = None,
    width: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    held: Array | None = None,
) -> tuple[DecodeState, Commit, Array | None, Layout]:
    """See ``step``; with ``law`` also the target's log-probabilities."""
    rows = state.length.shape[0] if rows is None else rows
    if proposal is None:
        width, admitted = 1, jnp.zeros(rows, jnp.int32)
    if width is None:
        width = proposal.tokens.shape[1] + 1  # type: ignore[union-attr]
    if tokens is not None:
        width = min(width, tokens)  # no row holds more: one row of T tokens needs no re-padding at all
    view = _take(state, rows)
    admitted = jnp.where(view.active, jnp.clip(admitted, 0, width - 1), 0)
    count = jnp.where(view.active, admitted + 1, 0)
    layout = ragged_layout(view.length, count, width, rows * width if tokens is None else tokens)
    drafted = jnp.zeros((rows, 0), jnp.int32) if proposal is None else proposal.tokens[:, : width - 1]
    flat = layout.flatten(jnp.concatenate([view.anchor[:, None], drafted], axis=1))
    taps = drafter.taps if drafter is not None else ()
    with jax.named_scope("verify_forward"):
        hidden, features, cache = target.forward(flat, layout, state.target, taps=taps, context=context)
        logits = target.unembed(hidden)
    with jax.named_scope("accept"):
        log_p = target_law(view, logits, drafted, layout, static) if law else None
        if log_p is None:
            spread = any(getattr(model, "spread", False) for model in (target, drafter))
            verdict, sound = decide(drafter, view, logits, layout, proposal, admitted, static, spread)
        else:
            verdict, sound = judge(drafter, view, log_p, layout, proposal, admitted, static)
        result = commit(verdict, drafted, admitted, view.active, view.remaining, view.stop_ids, sound)
    draft_state, ring = state.draft, state.ring
    if drafter is not None and held is not None:
        ring = _hold(ring, features, flat, held)
    elif drafter is not None:
        kept = jnp.where(view.active, verdict.accepted + 1, 0)
        draft_state = drafter.absorb(state.draft, features, layout, flat, kept)
    new = _advance(view, verdict, result, static)
    small = jax.tree.map(lambda whole, part: whole.at[:rows].set(part), state.small(), new)
    return small.replace(target=cache, draft=draft_state, ring=ring), result, log_p, layout


def init_ring(target: TargetModel, drafter: DrafterModel, slots: int, places: int) -> Ring:
    """An empty ring. Its width and dtype are those of the tapped states."""

    def features() -> Array:
        one = jnp.zeros(1, jnp.int32)
        layout = dense_layout(one, one, 1)
        return target.forward(one, layout, target.init_cache(1, 2), taps=drafter.taps, context=None)[1]

    tapped = jax.eval_shape(features)
    cells = (slots, 1, places)
    return Ring(jnp.zeros((*cells, tapped.shape[-1]), tapped.dtype), jnp.zeros((*cells, 1), jnp.int32))


def _hold(ring: Ring, features: Array, tokens: Array, held: Array) -> Ring:
    """Puts one token a row behind the ``held [R]`` ones that wait."""
    layout = dense_layout(held, jnp.ones_like(held), 1)
    return Ring(
        write_rows(ring.features, features[:, None, None, :], layout),
        write_rows(ring.tokens, tokens[:, None, None, None], layout),
    )


def absorb_held(
    drafter: DrafterModel,
    state: DecodeState,
    held: Array,
    *,
    width: int,
    first_slot: Array | int = 0,
    cells: int = 0,
) -> DecodeState:
    """The drafter catches up with the cycles that it was not asked in.

    Args:
        held: ``[R]`` tokens that wait in the ring: the last ones of the slots from ``first_slot`` on.
        width: tokens of a row absorbed at once (static), N a multiple of it; so many cells behind a row's last one
            must be free, as in a cycle that drafts.
        cells: of the drafter's cache (static). Where the N places of a ring end within them, and more than ``width``
            tokens wait, the whole ring is absorbed at once. 0: never. It pays on a CPU, where products of few tokens
            are written in another form (``nn/linear.py``): 64 tokens of the embedded drafter take 2 ms, in eights 12.
    """
    rows, places = held.shape[0], state.ring.tokens.shape[2]
    at = jnp.asarray(first_slot, jnp.int32)
    length = jax.lax.dynamic_slice_in_dim(state.length, at, rows, 0)
    zero = jnp.zeros((), jnp.int32)

    def absorb(size: int, i: Array, draft_state: Any) -> Any:
        done = (i * size).astype(jnp.int32)
        count = jnp.clip(held - done, 0, size)
        # Rows that are done write garbage behind their last token, like every short row.
        layout = dense_layout(jnp.minimum(length - held + done, length), count, size, at)

        def waiting(ring: Array) -> Array:
            start, shape = (at, zero, done, zero), (rows, 1, size, ring.shape[-1])
            return jax.lax.dynamic_slice(ring, start, shape).reshape(rows * size, -1)

        features, tokens = waiting(state.ring.features), waiting(state.ring.tokens)[:, 0]
        if size == places:  # the same in every turn, so XLA would compute it before the loop, for no turn as well
            features, _ = jax.lax.optimization_barrier((features, i))
        return drafter.absorb(draft_state, features, layout, tokens, count)

    with jax.named_scope("absorb_held"):
        draft, pieces = state.draft, (jnp.max(held) + width - 1) // width
        if places <= cells:
            # A loop of at most one turn, which leaves the caches in place where a condition might copy them.
            at_once = (pieces > 1) & jnp.all(length - held + places <= cells)
            draft = jax.lax.fori_loop(0, at_once.astype(jnp.int32), partial(absorb, places), draft)
            pieces = jnp.where(at_once, 0, pieces)
        return state.replace(draft=jax.lax.fori_loop(0, pieces, partial(absorb, width), draft))


def _advance(view: DecodeState, verdict: Verdict, result: Commit, static: Static) -> DecodeState:
    """The small arrays after a commit."""
    rule_state = view.rule
    if static.rule is not None:
        for k in range(result.tokens.shape[1]):
            rule_state = static.rule.advance(rule_state, result.tokens[:, k], k < result.count)
    return view.replace(
        length=view.length + result.count,
        anchor=jnp.where(view.active, verdict.next_token, view.anchor),
        active=view.active & ~result.finished,
        cycle=view.cycle + view.active,
        remaining=view.remaining - result.count,
        rule=rule_state,
    )


def prefill(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    tokens: Array,
    count: Array,
    last: Array,
    *,
    first_slot: Array | int = 0,
    context: int | None = None,
    static: Static = Static(),  # noqa: B008 - frozen
) -> tuple[DecodeState, Commit]:
    """Runs (a piece of) the prompts of R slots; rows that are ``last`` draw their first token and become active.

    Args:
        tokens: ``[R, P]`` right-padded. count: ``[R]`` tokens of this piece, 0 for none.
        last: ``[R]`` bool, the piece ends the prompt. first_slot: slot of row 0.

    Returns:
        the state, and a Commit of one token for the rows that are ``last``.
    """
    rows, width = tokens.shape
    at = jnp.asarray(first_slot, jnp.int32)
    small = state.small()
    view = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, rows, 0), small)
    layout = dense_layout(view.length, count, width, at)
    flat = tokens.reshape(-1)
    taps = drafter.taps if drafter is not None else ()
    with jax.named_scope("prefill_forward"):
        hidden, features, cache = target.forward(flat, layout, state.target, taps=taps, context=context)
    draft_state = state.draft
    if drafter is not None:
        draft_state = drafter.absorb(state.draft, features, layout, flat, count)
    final = layout.pad(hidden)[jnp.arange(rows), jnp.maximum(count - 1, 0)]
    logits = target.unembed(final)
    if static.rule is not None:
        logits = static.rule.apply(view.rule, logits, None)
    log_p = log_probs(logits, view.sampling)
    length = view.length + count.astype(jnp.int32)
    key = NoiseKey(view.seed, length, jnp.zeros_like(length), jnp.zeros_like(length))
    token = static.noise.categorical(log_p, key, None, view.sampling.greedy)
    verdict = Verdict(jnp.zeros(rows, jnp.int32), token)
    nothing = jnp.zeros((rows, 0), jnp.int32)
    sound = ~jnp.isnan(jnp.take_along_axis(log_p, token[:, None], axis=1))
    result = commit(verdict, nothing, jnp.zeros(rows, jnp.int32), last, view.remaining, view.stop_ids, sound)
    advanced = _advance(view.replace(active=last), verdict, result, static)
    view = advanced.replace(
        length=length, active=jnp.where(last, advanced.active, view.active), anchor=jnp.where(last, token, view.anchor)
    )
    small = jax.tree.map(lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, at, 0), small, view)
    return small.replace(target=cache, draft=draft_state, ring=state.ring), result
