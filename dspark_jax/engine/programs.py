"""The engine's compiled programs: the only place of this room that says ``jax.jit``.

Weights are arguments, the state is donated, and every program is compiled ahead of time under its ``Key``.
What a cycle emits leaves the device as one small integer array, so that reading it is one transfer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.cycle import DecodeState, Static, TargetModel
from dspark_jax.drafters.base import DrafterModel, Proposal
from dspark_jax.engine import copies, steps
from dspark_jax.engine.buckets import Buckets, Key, Piece
from dspark_jax.engine.placement import Placement
from dspark_jax.engine.prefix_cache import BLOCK
from dspark_jax.engine.slot_arrays import SlotArrays
from dspark_jax.types import Array

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


class Programs:
    """Compiled programs by key, and the calls that use them.

    Args:
        rule: how the draft program admits, see ``steps.draft``.
        max_positions: the target's context window, the only reason to shorten a block.
        temperature: of the slots that ``rehearse`` pretends to serve.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterModel | None,
        buckets: Buckets,
        *,
        slots: int,
        stop_ids: int,
        rule: str,
        max_positions: int,
        static: Static,
        temperature: float = 1.0,
    ) -> None:
        self._target, self._drafter, self.buckets = target, drafter, buckets
        self._slots, self.arrays = slots, SlotArrays(stop_ids)
        self._rule, self._max_positions, self._static = rule, max_positions, static
        self._temperature = temperature
        self._place = Placement(target, drafter)
        self._table: dict[Key, Callable[..., Any]] = {}
        self._proposal: Proposal | None = None  # of all slots; the next draft overwrites its base logits
        self._store: copies.Store | None = None
        self.warm = False
        self.late_compiles = 0

    # State

    def init_state(self) -> DecodeState:
        """All slots idle, caches empty; the store of prefixes too."""
        self._store = self._proposal = None
        if rows := self.buckets.stored_blocks:
            draft = None if self._drafter is None else self._drafter.init(rows, BLOCK)
            self._store = self._place.put(copies.Store(self._target.init_cache(rows, BLOCK), draft))
        state = self._place.put(self._fresh())
        if self._drafter is not None:
            self._last_proposal(state)  # here, since making arrays compiles: the first draft behind a reset shall not
        return state

    def state_shapes(self) -> DecodeState:
        """The shapes of ``init_state``, for lowering a program without the memory of its caches."""
        return self._place.shapes(jax.eval_shape(self._fresh))

    def _fresh(self) -> DecodeState:
        slots, cells = self._slots, self.buckets.cells
        return self._everywhere(self.arrays.idle()).replace(
            target=self._target.init_cache(slots, cells),
            draft=None if self._drafter is None else self._drafter.init(slots, cells),
            ring=self._ring(),
        )

    def _ring(self) -> cycle.Ring | None:
        if self._drafter is None or not self.buckets.skips:
            return None
        return cycle.init_ring(self._target, self._drafter, self._slots, self.buckets.ring)

    def _everywhere(self, values: DecodeState) -> DecodeState:
        """The small arrays of all slots, alike."""
        return jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a), (self._slots, *np.shape(a))).copy(), values)

    # Calls

    def admit(self, state: DecodeState, slot: int | None, values: DecodeState) -> DecodeState:
        return self._run(Key("admit"), state, _index(slot), values)

    def move(self, state: DecodeState, source: int, to: int) -> DecodeState:
        return self._copy(state, source=source, to=to)[0]

    def save(self, state: DecodeState, slot: int | None, first: int, rows: Sequence[int]) -> tuple[DecodeState, Array]:
        """Copies the blocks of a slot's text from block ``first`` on into rows of the store. Returns the state, and
        whether all that was copied is finite (a bool on the device)."""
        state, sound = self._copy(state, slot=_index(slot), first=first, rows=rows, saved=len(rows))
        return state, sound

    def load(self, state: DecodeState, slot: int | None, first: int, rows: Sequence[int]) -> DecodeState:
        """Copies rows of the store to a slot: its text's blocks from block ``first`` on."""
        return self._copy(state, slot=_index(slot), first=first, rows=rows, loaded=len(rows))[0]

    def _copy(self, state: DecodeState, **job: Any) -> tuple[DecodeState, Array]:
        wanted = copies.job(self.buckets.cells // BLOCK, **job)
        state, _, sound = self._run(Key("copy"), state, self._store, wanted, self.arrays.idle())
        return state, sound

    def prefill(
        self, state: DecodeState, slot: int | None, piece: Piece, prompt: Sequence[int], last: bool
    ) -> tuple[DecodeState, Array]:
        """A piece of ``prompt``; the packed commit ``[1, 7]`` holds the first token where it is the ``last``."""
        tokens = np.zeros((1, piece.size), np.int32)
        tokens[0, : piece.count] = prompt[piece.start : piece.start + piece.count]
        count, final = np.array([piece.count], np.int32), np.array([last])
        key = Key("prefill", 0, piece.size, piece.context)
        return self._run(key, state, tokens, count, final, _index(slot))

    def draft(
        self,
        state: DecodeState,
        key: Key,
        total: int,
        threshold: float,
        calibration: np.ndarray,
        shift: np.ndarray,
        least: np.ndarray,
        most: np.ndarray,
        slots: np.ndarray,
    ) -> steps.Draft:
        """See ``steps.draft``; ``calibration [R, G]`` and ``shift [R]`` float32, ``least``, ``most`` and ``slots``
        ``[R]`` int32. Call ``verify`` before the next one."""
        numbers = np.int32(total), np.float32(threshold), calibration, shift, least, most, slots
        draft = self._run(key, _as_drafted(state), self._last_proposal(state).base, *numbers)
        self._proposal = draft.proposal
        return draft

    def verify(
        self, state: DecodeState, key: Key, proposal: Proposal, admitted: Array | np.ndarray
    ) -> tuple[DecodeState, Array]:
        """The packed commit is ``[R, W + 6]``."""
        return self._run(key, state, proposal, admitted)

    def plain(self, state: DecodeState, key: Key, held: np.ndarray) -> tuple[DecodeState, Array]:
        """One token for every active slot; the packed commit is ``[R, 7]``. ``held [R]``: tokens that the drafter has
        not absorbed."""
        return self._run(key, state, held)

    def absorb(self, state: DecodeState, held: Mapping[int, int]) -> DecodeState:
        """The drafter absorbs the tokens that slots hold, by slot; none is held any more."""
        rows = self.buckets.absorb_rows
        for slot, count in held.items() if rows == 1 else [(0, 0)]:
            counts = np.array([count] if rows == 1 else [held.get(r, 0) for r in range(rows)], np.int32)
            state = self._run(Key("absorb", rows), state, np.int32(slot), counts)
        return state

    # Measuring

    def rehearse(self, key: Key, state: DecodeState) -> tuple[DecodeState, float]:
        """Runs a draft, verify or plain program in full use: every slot decodes, the context is full, as many drafts
        are admitted as fit. Returns the state, and the seconds it took. ``rest`` makes the state idle again."""
        busy = self.arrays.busy(self._temperature)
        length = np.int32(max(key.context - self.buckets.width - 1, 0))
        small = self._place.put(self._everywhere(busy.replace(length=length, active=np.bool_(True))))
        state = small.with_caches(state)
        arguments = list(self._example(key, state))
        if key.kind == "verify":
            rows = np.arange(key.slots)
            arguments[2][rows] = key.tokens // key.slots - 1 + (rows < key.tokens % key.slots)
        jax.block_until_ready(arguments)
        out, seconds = _timed(lambda: jax.block_until_ready(self._run(key, *arguments)))
        return self._state_after(key, state, out), seconds

    def rest(self, state: DecodeState) -> DecodeState:
        """All slots idle; the caches stay as they are."""
        small = self._place.put(self._everywhere(self.arrays.idle()))
        return small.with_caches(state)

    # Compilation

    def _run(self, key: Key, *arguments: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._keep_store(key, self._function(key)(*self._weights(key), *arguments))
        program = self._table.get(key)
        if program is None:
            program, seconds = _timed(lambda: self._lower(key, arguments).compile())
            self._table[key] = program
            if self.warm:
                self.late_compiles += 1
                logger.warning("compiled %s after the warm-up: %.1f s", key, seconds)
        return self._keep_store(key, program(*self._weights(key), *arguments))

    def _keep_store(self, key: Key, out: Any) -> Any:
        """``out``; the store that it holds replaces the old one, which was donated."""
        if key.kind == "copy":
            self._store = out[1]
        return out

    def _weights(self, key: Key) -> tuple[Any, ...]:
        if key.kind in ("admit", "copy"):
            return ()
        return (self._drafter,) if key.kind in ("draft", "absorb") else (self._target, self._drafter)

    def _function(self, key: Key) -> Callable[..., Any]:
        """The function of a key, its sizes bound."""
        rows, context, static = key.slots, key.context, self._static

        def bound(f: Callable[..., Any], **sizes: Any) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                return f(*arguments, **sizes)

            call.__name__ = f"engine_{key.kind}"  # shown in profiles
            return call

        match key.kind:
            case "admit":
                return bound(steps.admit)
            case "copy":
                return bound(copies.copy)
            case "prefill":
                return bound(steps.prefill, context=context, static=static)
            case "draft":
                return bound(
                    steps.draft,
                    rows=rows,
                    drafts=key.tokens or self.buckets.drafts,
                    context=context,
                    max_positions=self._max_positions,
                    rule=self._rule,
                    static=static,
                )
            case "verify":
                return bound(steps.verify, rows=rows, tokens=key.tokens, context=context, static=static)
            case "absorb":
                # One slot after the other on CPU, so that a whole ring is no great forward.
                cells = self.buckets.cells if rows == 1 else 0
                return bound(steps.absorb, width=self.buckets.width, cells=cells)
            case "plain":
                return bound(steps.plain, rows=rows, context=context, static=static)
        raise ValueError(f"no program of kind {key.kind!r}")

    def lower(self, key: Key, state: DecodeState) -> Any:
        """A program on shapes (``state_shapes``)."""
        if self._proposal is None and self._drafter is not None:
            self._proposal = self._place.shapes(self._proposal_shapes(state))
        return self._lower(key, self._example(key, state))

    def _lower(self, key: Key, arguments: Sequence[Any]) -> Any:
        weights = self._weights(key)
        # The state is donated, the store too; a draft leaves the state alone, and overwrites the logits behind it.
        first = len(weights) + (key.kind == "draft")
        donated = (first, first + 1) if key.kind == "copy" else (first,)
        function, arguments = self._function(key), self._place.numbers(arguments)
        with self._place.tracing():
            options = self._place.out_shardings(
                key.kind, arguments[0], lambda: jax.eval_shape(function, *weights, *arguments)
            )
            return jax.jit(function, donate_argnums=donated, **options).lower(*weights, *arguments)

    def compile_all(self, keys: Sequence[Key], state: DecodeState, progress: Progress) -> DecodeState:
        """Compiles and runs every program once on an idle state; a line each. Returns the state.

        Tracing needs Python; XLA does not, so two compilations run beside it.
        """
        todo = [key for key in keys if key not in self._table]
        waiting: deque[tuple[Key, float, Future[tuple[Any, float]]]] = deque()
        done = 0
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile") as pool:
            for key in [*todo, None]:
                if key is not None:
                    lowered, seconds = _timed(self._lower, key, self._example(key, state))
                    waiting.append((key, seconds, pool.submit(_timed, lowered.compile)))
                while waiting and (key is None or len(waiting) > 2):
                    ready, seconds, future = waiting.popleft()
                    self._table[ready], more = future.result()
                    state, done = self._try(ready, state), done + 1
                    progress(f"compiled {ready} ({done}/{len(todo)}) {seconds + more:.1f} s")
        return state

    def _example(self, key: Key, state: DecodeState) -> tuple[Any, ...]:
        """Arguments behind the weights that change nothing when run on idle slots."""
        match key.kind:
            case "admit":
                return state, np.int32(0), self.arrays.idle()
            case "copy":
                return state, self._store, copies.job(self.buckets.cells // BLOCK), self.arrays.idle()
            case "prefill":
                tokens = np.zeros((1, key.tokens), np.int32)
                return state, tokens, np.zeros(1, np.int32), np.zeros(1, bool), np.int32(0)
            case "draft":
                calibration = np.ones((key.slots, self.buckets.drafts), np.float32)
                shift, least = np.zeros(key.slots, np.float32), np.zeros(key.slots, np.int32)
                slots = np.arange(key.slots, dtype=np.int32)
                numbers = np.int32(0), np.float32(0.0), calibration, shift, least, least.copy(), slots
                return _as_drafted(state), self._last_proposal(state).base, *numbers
            case "verify":
                return state, self._last_proposal(state), np.zeros(self._slots, np.int32)
            case "absorb":
                return state, np.int32(0), np.zeros(key.slots, np.int32)
            case "plain":
                return state, np.zeros(key.slots, np.int32)
        raise ValueError(f"no program of kind {key.kind!r}")

    def _last_proposal(self, state: DecodeState) -> Proposal:
        """Of the last draft; zeros before the first one."""
        if self._proposal is None:
            zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._proposal_shapes(state))
            self._proposal = self._place.put(zeros)
        return self._proposal

    def _proposal_shapes(self, state: DecodeState) -> Proposal:
        def propose(drafter: DrafterModel, state: DecodeState) -> Proposal:
            return cycle.draft(drafter, state, num_drafts=self.buckets.drafts, static=self._static)

        with self._place.tracing():
            return jax.eval_shape(propose, self._drafter, _as_drafted(state))

    def _try(self, key: Key, state: DecodeState) -> DecodeState:
        out = jax.block_until_ready(self._run(key, *self._example(key, state)))
        return self._state_after(key, state, out)

    def _state_after(self, key: Key, state: DecodeState, out: Any) -> DecodeState:
        """What a program that ran on an example leaves; a draft leaves the state as it was."""
        if key.kind == "draft":
            self._proposal = out.proposal
            return state
        return out[0] if isinstance(out, tuple) else out


def _timed(f: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What ``f`` returns, and the seconds it took."""
    begin = time.perf_counter()
    return f(*arguments), time.perf_counter() - begin


def _as_drafted(state: DecodeState) -> DecodeState:
    """The part of a state that drafting reads."""
    return state.replace(target=None, ring=None)


def _index(slot: int | None) -> np.int32:
    """A tenant's slot as the programs take it. Raises RuntimeError where it has none."""
    if slot is None:
        raise RuntimeError("a request without a slot cannot be run")
    return np.int32(slot)
