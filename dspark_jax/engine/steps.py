"""What the engine's programs compute: the halves of ``cycle.py``, the upkeep of slots, and the one small array in
which a cycle's outcome leaves the device. Pure functions; ``programs.py`` compiles them.

R rows are the lowest slots of a slot bucket; W is the block width of the program, 1 without drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.cycle import DecodeState, Static, TargetModel
from dspark_jax.drafters.base import DrafterModel, Proposal
from dspark_jax.kv_cache import KVCache
from dspark_jax.schedule.prefix import admit_threshold, admit_top_k_device, survival_device
from dspark_jax.types import Array, PyTree
from dspark_jax.verify import Commit

MOVE_CHUNK = 256
"""Cache cells that a move copies at once; it stops behind the last valid one."""


class Draft(NamedTuple):
    """What the draft program returns, by slot: all S of them, so that any verify program takes the draft of any draft
    program. Where a slot was not drafted for, nothing is admitted."""

    proposal: Proposal  # its base logits are given away with the next draft
    admitted: Array  # [S] int32 drafts to verify
    survival: Array  # [S, G] float32: 0 where no draft may be admitted, rows non-increasing


class Emitted(NamedTuple):
    """A Commit on the host."""

    tokens: np.ndarray  # [R, W]
    count: np.ndarray  # type: ignore[assignment]  # [R]; shadows tuple.count
    accepted: np.ndarray  # [R]
    offered: np.ndarray  # [R]
    finished: np.ndarray  # [R] bool
    stopped: np.ndarray  # [R] bool
    failed: np.ndarray  # [R] bool


def pack(commit: Commit) -> Array:
    """``[R, W + 6]`` int32."""
    columns = (commit.count, commit.accepted, commit.offered, commit.finished, commit.stopped, commit.failed)
    return jnp.concatenate([commit.tokens, jnp.stack([c.astype(jnp.int32) for c in columns], axis=1)], axis=1)


def unpack(packed: Array) -> Emitted:
    """Waits for the device."""
    host = np.asarray(packed)
    count, accepted, offered, finished, stopped, failed = host[:, -6:].T
    return Emitted(host[:, :-6], count, accepted, offered, finished != 0, stopped != 0, failed != 0)


def prefill(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    tokens: Array,
    count: Array,
    last: Array,
    slot: Array,
    *,
    context: int,
    static: Static,
) -> tuple[DecodeState, Array]:
    """A piece of the prompt of one slot: tokens ``[1, P]``, count and last ``[1]``, slot []."""
    state, commit = cycle.prefill(
        target, drafter, state, tokens, count, last, first_slot=slot, context=context, static=static
    )
    return state, pack(commit)


def draft(
    drafter: DrafterModel,
    state: DecodeState,
    base: Array,
    total: Array,
    threshold: Array,
    calibration: Array,
    shift: Array,
    least: Array,
    most: Array,
    slots: Array,
    *,
    rows: int,
    drafts: int,
    context: int,
    max_positions: int,
    rule: str,
    static: Static,
) -> Draft:
    """A block for each of R rows, and how much of it to verify.

    A program may draft narrower blocks than those of G that all others are made for: what it returns is padded to G,
    with survivals of 0, and nothing behind its own width is admitted.

    Args:
        drafts: of a block, at most G.
        base: ``[G, S, Vd]`` logits of the draft before, overwritten where the rows are (donated).
        total: [] int32, drafts to admit over all rows (rule ``top_k``).
        threshold: [] float32, of the raw sigmoid of each confidence (rule ``threshold``).
        calibration: ``[R, G]`` confidence temperatures of each request, 1 for raw confidences; for a drafter without
            a confidence head the estimated acceptance of each position itself.
        shift: ``[R]`` float32, added to each request's confidence logits before the temperatures.
        least: ``[R]`` int32 (rule ``top_k``): the first so many drafts of a row are admitted before all others, and
            count in ``total``; -1: the row gets none.
        most: ``[R]`` int32 (rules ``all`` and ``threshold``): drafts of a row that are admitted at most.
        slots: ``[R]`` int32, ascending: the slots that the rows are. Where R = S they are all of them.
        max_positions: the target's window, the only reason to shorten a block.
        rule: ``all`` | ``threshold`` | ``top_k``. Each looks at confidences and at no token.
    """
    everyone = rows == state.length.shape[0]
    state = state if everyone else _of_slots(state, slots, context)
    proposal = cycle.draft(drafter, state, num_drafts=drafts, rows=rows, context=context, static=static)
    room = jnp.where(state.active[:rows], cycle.window_limit(state, max_positions, rows), 0)
    calibration = calibration[:, :drafts]
    conditional = calibration.astype(jnp.float32)
    if proposal.confidence_logits is not None:
        logits = proposal.confidence_logits + shift[:, None].astype(proposal.confidence_logits.dtype)
        conditional = jax.nn.sigmoid(logits / calibration.astype(logits.dtype)).astype(jnp.float32)
    place = jnp.arange(drafts)[None, :]
    # A confidence that is no number is none at all, and must not reach those the row competes with.
    survival = survival_device(jnp.nan_to_num(conditional, nan=0.0))
    survival = jnp.where((place < room[:, None]) & (least[:, None] >= 0), survival, 0.0)
    if rule == "top_k":
        # 2 is above every probability. Who comes first for this reason is known before any token is drawn.
        first = (place < least[:, None]) & (place < room[:, None])
        admitted = admit_top_k_device(jnp.where(first, 2.0, survival), total)
    elif rule == "threshold":
        admitted = jnp.minimum(
            admit_threshold(jax.nn.sigmoid(jnp.asarray(proposal.confidence_logits)), threshold), most
        )
    else:
        admitted = jnp.minimum(most, drafts)
    admitted, missing = jnp.minimum(admitted, room).astype(jnp.int32), base.shape[0] - drafts
    if missing:
        survival = jnp.pad(survival, ((0, 0), (0, missing)))
        proposal = _padded(proposal, missing)
    if everyone:
        if missing:  # the places behind are never read
            proposal = proposal.replace(base=base.at[:drafts].set(proposal.base))
        return Draft(proposal, admitted, survival)
    admitted, survival = (_among(a, slots, base.shape[1]) for a in (admitted, survival))
    return Draft(_placed(proposal, slots, base), admitted, survival)


def _padded(proposal: Proposal, missing: int) -> Proposal:
    """A proposal as one of ``missing`` more drafts, zeros all of them; ``base``, which is written over an older one,
    stays as it is."""
    by_row = proposal.replace(base=None, z=None)
    wider = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, missing))), by_row)
    z = None if proposal.z is None else jnp.pad(proposal.z, ((0, missing), (0, 0), (0, 0)))
    return wider.replace(base=proposal.base, z=z)


def _among(a: Array, slots: Array, number: int) -> Array:
    """``a [R, ...]`` among the rows of all ``number`` slots, zeros elsewhere."""
    return jnp.zeros((number, *a.shape[1:]), a.dtype).at[slots].set(a)


def _placed(proposal: Proposal, slots: Array, base: Array) -> Proposal:
    """A proposal for R rows as one for all slots, in the memory of ``base``."""
    by_row = proposal.replace(base=None, z=None)
    placed = jax.tree.map(lambda a: _among(a, slots, base.shape[1]), by_row)
    z = proposal.z
    if z is not None:
        z = jnp.zeros((z.shape[0], base.shape[1], z.shape[2]), z.dtype).at[:, slots].set(z)
    return placed.replace(base=base.at[: proposal.base.shape[0], slots].set(proposal.base), z=z)


def _of_slots(state: DecodeState, slots: Array, context: int) -> DecodeState:
    """The rows ``slots [R]`` of a state, as far as drafting reads it: ``context`` cells of its caches."""

    def part(cache: PyTree) -> PyTree:
        if not isinstance(cache, KVCache):
            return cache[slots]  # a scripted model's state, or what a chain remembers: slots first
        if cache.stacked:
            return jax.tree.map(lambda a: a[:, slots, :, :context], cache)
        return jax.tree.map(lambda a: a[slots, :, :context], cache)

    small = jax.tree.map(lambda a: a[slots], state.small())
    return small.replace(draft=jax.tree.map(part, state.draft, is_leaf=lambda x: isinstance(x, KVCache)))


def verify(
    target: TargetModel,
    drafter: DrafterModel,
    state: DecodeState,
    proposal: Proposal,
    admitted: Array,
    *,
    rows: int,
    tokens: int,
    context: int,
    static: Static,
) -> tuple[DecodeState, Array]:
    """The admitted drafts of each row, in a forward of ``tokens`` flat tokens; ``proposal`` and ``admitted`` are those
    of all slots."""
    # Of the large arrays one row of each request is read, so they stay whole.
    small = {name: getattr(proposal, name)[:rows] for name in ("tokens", "draft_index", "log_q")}
    proposal = proposal.replace(**small)
    state, commit = cycle.step(
        target, drafter, state, proposal, admitted[:rows], rows=rows, tokens=tokens, context=context, static=static
    )
    return state, pack(commit)


def plain(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    held: Array,
    *,
    rows: int,
    context: int,
    static: Static,
) -> tuple[DecodeState, Array]:
    """One token for every active row. A drafter does nothing: what it will have to absorb joins the ``held [R]``
    tokens of the ring."""
    at = None if state.ring is None else held
    state, commit = cycle.step(target, drafter, state, None, None, rows=rows, context=context, held=at, static=static)
    return state, pack(commit)


def absorb(
    drafter: DrafterModel, state: DecodeState, slot: Array, held: Array, *, width: int, cells: int
) -> DecodeState:
    """The ``held [R]`` tokens of the ring become drafter context, for the R slots from ``slot`` on."""
    return cycle.absorb_held(drafter, state, held, width=width, first_slot=slot, cells=cells)


def admit(state: DecodeState, slot: Array, values: DecodeState) -> DecodeState:
    """Sets the small arrays of one slot. The cache is left as it is: its cells are past the new length."""
    small = jax.tree.map(lambda whole, value: whole.at[slot].set(value), state.small(), values)
    return small.with_caches(state)


def move(state: DecodeState, source: Array, to: Array, idle: DecodeState) -> DecodeState:
    """Moves a tenant: its small arrays and the valid cells of its caches; ``source`` becomes idle. Where both are the
    same slot nothing happens."""
    moves = source != to

    def one(a: Array, empty: Array) -> Array:
        return a.at[to].set(a[source]).at[source].set(jnp.where(moves, empty, a[source]))

    small = jax.tree.map(one, state.small(), idle)
    length = jnp.where(moves, state.length[source], 0)

    def copy(cache: PyTree) -> PyTree:
        if isinstance(cache, KVCache):
            return _copy_cells(cache, source, to, length)
        return cache.at[to].set(cache[source])  # a scripted model's state: slots first

    def walk(tree: PyTree) -> PyTree:
        return jax.tree.map(copy, tree, is_leaf=lambda x: isinstance(x, KVCache))

    return small.replace(target=walk(state.target), draft=walk(state.draft), ring=walk(state.ring))


def _copy_cells(cache: KVCache, source: Array, to: Array, length: Array) -> KVCache:
    """Slot ``source``'s first ``length`` cells to slot ``to``, a chunk at a time: whole caches are never copied."""
    chunk = min(MOVE_CHUNK, cache.length)
    slot_axis = 1 if cache.stacked else 0

    def body(i: Array, cells: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        # The last chunk may overlap the one before it.
        start = jnp.minimum(i * chunk, cache.length - chunk).astype(jnp.int32)

        def one(a: Array) -> Array:
            size = list(a.shape)
            size[slot_axis], size[-2] = 1, chunk
            at: list[Any] = [jnp.zeros((), jnp.int32)] * a.ndim
            at[-2] = start
            at[slot_axis] = source
            block = jax.lax.dynamic_slice(a, at, size)
            at[slot_axis] = to
            return jax.lax.dynamic_update_slice(a, block, at)

        return jax.tree.map(one, cells)

    k, v = jax.lax.fori_loop(0, (length + chunk - 1) // chunk, body, (cache.k, cache.v))
    return KVCache(k, v)
