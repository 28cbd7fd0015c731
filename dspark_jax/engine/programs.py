"""The engine's compiled programs: the only place of this room that says ``jax.jit``.

Weights are arguments, the state is donated, and every program is compiled ahead of time under its ``Key``.
What a cycle emits leaves the device as one small integer array, so that reading it is one transfer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState, Static, TargetModel
from dspark_jax.drafters.base import DrafterModel, Proposal
from dspark_jax.engine import steps
from dspark_jax.engine.buckets import Buckets, Key, Piece
from dspark_jax.engine.placement import Placement
from dspark_jax.engine.slots import Tenant
from dspark_jax.sampling import sampling_row
from dspark_jax.types import EMPTY, Array

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]


class Programs:
    """Compiled programs by key, and the calls that use them.

    Args:
        rule: how the draft program admits, see ``steps.draft``.
        max_positions: the target's context window, the only reason to shorten a block.
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
    ) -> None:
        self._target, self._drafter, self._buckets = target, drafter, buckets
        self._slots, self._stop_ids = slots, stop_ids
        self._rule, self._max_positions, self._static = rule, max_positions, static
        self._place = Placement(target)
        self._table: dict[Key, Callable[..., Any]] = {}
        self._proposals: dict[int, Proposal] = {}  # shapes, by slot bucket
        self.warm = False
        self.late_compiles = 0

    # State

    def init_state(self) -> DecodeState:
        """All slots idle, caches empty."""
        slots, cells = self._slots, self._buckets.cells
        small = jax.tree.map(lambda a: jnp.broadcast_to(jnp.asarray(a), (slots, *np.shape(a))).copy(), self.idle())
        state = small.replace(
            target=self._target.init_cache(slots, cells),
            draft=None if self._drafter is None else self._drafter.init(slots, cells),
        )
        return self._place.put(state)

    def idle(self) -> DecodeState:
        """The small arrays of an idle slot.

        Its temperature is 0, so that a batch of greedy requests skips the noise although slots are idle: the tests
        for that ask *all* rows. Nothing divides by it (``log_probs`` takes 1 for greedy rows), every row reads its
        own settings only, and padding tokens those of a row whose results are dropped. So no value here could reach a
        real row; tests/law/test_layouts.py tries wild ones at temperature > 0.
        """
        return self._small(0, False, 0, 0.0, 0, 1.0, 0.0, ())

    def values(self, tenant: Tenant) -> DecodeState:
        """The small arrays of a slot whose tenant is about to be prefilled."""
        request, s = tenant.request, tenant.request.sampling
        return self._small(
            tenant.seed, request.coupled, request.limit, s.temperature, s.top_k, s.top_p, s.min_p, request.stop_ids
        )

    def _small(
        self,
        seed: int,
        coupled: bool,
        remaining: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        stops: Sequence[int],
    ) -> DecodeState:
        stop_ids = np.full(self._stop_ids, EMPTY, np.int32)
        stop_ids[: len(stops)] = stops
        values: dict[str, Any] = {
            "length": np.int32(0),
            "anchor": np.int32(0),
            "active": np.bool_(False),
            "seed": np.uint32(seed),
            "cycle": np.int32(0),
            "coupled": np.bool_(coupled),
            "remaining": np.int32(remaining),
            "stop_ids": stop_ids,
            "sampling": sampling_row(Sampling(temperature, top_k, top_p, min_p)),
        }
        return DecodeState(**values, rule=None, target=None, draft=None)

    # Calls

    def admit(self, state: DecodeState, slot: int | None, values: DecodeState) -> DecodeState:
        return self._run(Key("admit"), state, _index(slot), values)

    def move(self, state: DecodeState, source: int, to: int) -> DecodeState:
        return self._run(Key("move"), state, np.int32(source), np.int32(to), self.idle())

    def prefill(
        self, state: DecodeState, slot: int | None, piece: Piece, prompt: Sequence[int], last: bool
    ) -> tuple[DecodeState, Array]:
        """A piece of ``prompt``; the packed commit ``[1, 7]`` holds the first token where it is the ``last``."""
        tokens = np.zeros((1, piece.size), np.int32)
        tokens[0, : piece.count] = prompt[piece.start : piece.start + piece.count]
        count, final = np.array([piece.count], np.int32), np.array([last])
        key = Key("prefill", 0, piece.size, piece.context)
        return self._run(key, state, tokens, count, final, _index(slot))

    def draft(self, state: DecodeState, key: Key, total: int, threshold: float, temperature: np.ndarray) -> steps.Draft:
        """See ``steps.draft``; ``temperature [R, G]`` float32."""
        return self._run(key, state.replace(target=None), np.int32(total), np.float32(threshold), temperature)

    def verify(
        self, state: DecodeState, key: Key, proposal: Proposal, admitted: Array | np.ndarray
    ) -> tuple[DecodeState, Array]:
        """The packed commit is ``[R, W + 6]``."""
        return self._run(key, state, proposal, admitted)

    def plain(self, state: DecodeState, key: Key) -> tuple[DecodeState, Array]:
        """One token for every active slot; the packed commit is ``[R, 7]``."""
        return self._run(key, state)

    # Compilation

    def _run(self, key: Key, *arguments: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._function(key)(*self._weights(key), *arguments)
        program = self._table.get(key)
        if program is None:
            program, seconds = _timed(lambda: self._lower(key, arguments).compile())
            self._table[key] = program
            if self.warm:
                self.late_compiles += 1
                logger.warning("compiled %s after the warm-up: %.1f s", key, seconds)
        return program(*self._weights(key), *arguments)

    def _weights(self, key: Key) -> tuple[Any, ...]:
        if key.kind in ("admit", "move"):
            return ()
        return (self._drafter,) if key.kind == "draft" else (self._target, self._drafter)

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
            case "move":
                return bound(steps.move)
            case "prefill":
                return bound(steps.prefill, context=context, static=static)
            case "draft":
                return bound(
                    steps.draft,
                    rows=rows,
                    drafts=self._buckets.drafts,
                    context=context,
                    max_positions=self._max_positions,
                    rule=self._rule,
                    static=static,
                )
            case "verify":
                return bound(steps.verify, rows=rows, tokens=key.tokens, context=context, static=static)
            case "plain":
                return bound(steps.plain, rows=rows, context=context, static=static)
        raise ValueError(f"no program of kind {key.kind!r}")

    def _lower(self, key: Key, arguments: Sequence[Any]) -> Any:
        weights = self._weights(key)
        donated = () if key.kind == "draft" else (len(weights),)
        options = self._place.out_shardings(key.kind, arguments[0])
        lowered = jax.jit(self._function(key), donate_argnums=donated, **options).lower(*weights, *arguments)
        if key.kind == "draft":
            self._proposals[key.slots] = lowered.out_info.proposal
        return lowered

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
                return state, np.int32(0), self.idle()
            case "move":
                return state, np.int32(0), np.int32(0), self.idle()
            case "prefill":
                tokens = np.zeros((1, key.tokens), np.int32)
                return state, tokens, np.zeros(1, np.int32), np.zeros(1, bool), np.int32(0)
            case "draft":
                temperature = np.ones((key.slots, self._buckets.drafts), np.float32)
                return state.replace(target=None), np.int32(0), np.float32(0.0), temperature
            case "verify":
                return state, self._example_proposal(key.slots), np.zeros(key.slots, np.int32)
        return (state,)

    def _example_proposal(self, slots: int) -> Proposal:
        """Zeros of the shapes that the draft program returns; it is lowered first."""
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._proposals[slots])
        return self._place.put(zeros)

    def _try(self, key: Key, state: DecodeState) -> DecodeState:
        out = self._run(key, *self._example(key, state))
        jax.block_until_ready(out)
        if key.kind == "draft":
            return state
        return out[0] if isinstance(out, tuple) else out


def _timed(f: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What ``f`` returns, and the seconds it took."""
    begin = time.perf_counter()
    return f(*arguments), time.perf_counter() - begin


def _index(slot: int | None) -> np.int32:
    """A tenant's slot as the programs take it. Raises RuntimeError where it has none."""
    if slot is None:
        raise RuntimeError("a request without a slot cannot be run")
    return np.int32(slot)
