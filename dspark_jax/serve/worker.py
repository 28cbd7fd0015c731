"""The one thread that touches the engine: builds it, feeds it, steps it, hands its events over.

Everything that calls JAX after start-up happens here, so the engine needs no locks. Other threads put
commands in a queue; the thread drains it before every step. A failing step fails the requests that were in
it, not the server.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from dspark_jax.config import Sampling

logger = logging.getLogger(__name__)

# Steps that fail in a row, without a good one between, before the engine is given up.
MAX_FAILED_STEPS = 8
_COUNTERS_EVERY_S = 0.2


class EngineRequest(Protocol):
    """What the engine is given (``dspark_jax.engine.Request``)."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int | None
    verification: str | None
    stop_token_ids: tuple[int, ...]


class EngineEvent(Protocol):
    """What one step did for one request (``dspark_jax.engine.Event``)."""

    id: int
    tokens: list[int]
    finished: bool
    finish_reason: str | None
    committed: list[int]
    offered: list[int]
    cached_tokens: int


class EngineLike(Protocol):
    """The part of ``dspark_jax.engine.Engine`` that serving uses."""

    def submit(self, request: Any) -> int: ...
    def step(self) -> Sequence[Any]: ...
    def cancel(self, request_id: int) -> Any: ...
    def has_work(self) -> bool: ...
    def counters(self) -> Mapping[str, Any]: ...
    def reset(self) -> None: ...


State = Literal["starting", "ready", "failed", "stopped"]
Sink = Callable[[Any], None]  # receives an EngineEvent or an Exception, in the worker's thread


class WorkerDown(RuntimeError):
    """The engine is not there: still starting, stopped, or given up."""


class Handle:
    """One submitted request. ``accepted`` completes with None, or with the engine's ValueError."""

    def __init__(self, request: Any, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.id: int | None = None  # the engine's id; the worker's thread only
        self.cancelled = False


class EngineWorker:
    """Owns the engine's thread.

    Args:
        build: makes the engine, every shape compiled; runs in the thread. ``error`` keeps what it raises.
        on_ready: called in the thread with the engine once it can take requests.
        on_down: called in the thread when it ends by an error, with that error.
    """

    def __init__(
        self,
        build: Callable[[], EngineLike],
        *,
        on_ready: Callable[[EngineLike], None] = lambda engine: None,
        on_down: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._build = build
        self._on_ready = on_ready
        self._on_down = on_down
        self._commands: queue.SimpleQueue[tuple[str, Handle | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # state and the queue change together
        self._state: State = "starting"
        self._live: dict[int, Handle] = {}
        self._failed_steps = 0
        self._counters: dict[str, Any] = {}
        self._counters_at = 0.0
        self._thread = threading.Thread(target=self._main, name="dspark-engine", daemon=True)
        self.error: BaseException | None = None

    # -- from any thread ---------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """starting (loading, compiling), ready, failed (see ``error``) or stopped."""
        return self._state

    @property
    def counters(self) -> Mapping[str, Any]:
        """The engine's counters, at most a fraction of a second old while it works."""
        return self._counters

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end after its current step. True if it did within ``timeout_s``; a compilation
        cannot be interrupted, so False is possible during start-up."""
        self._commands.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: Any, sink: Sink) -> Handle:
        """Queues a request; wait for ``Handle.accepted``.

        Raises:
            WorkerDown: the engine cannot take requests.
        """
        handle = Handle(request, sink)
        self._put("submit", handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Frees the request's slot soon; its sink hears nothing more after the current step. Harmless once
        it has ended."""
        handle.cancelled = True
        try:
            self._put("cancel", handle)
        except WorkerDown:
            pass

    def _put(self, what: str, handle: Handle) -> None:
        with self._lock:
            if self._state != "ready":
                raise WorkerDown(self._state)
            self._commands.put((what, handle))

    # -- the thread --------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._engine = self._build()
            with self._lock:
                self._state = "ready"
            self._on_ready(self._engine)
            while True:
                idle = not self._engine.has_work()
                if idle:
                    self._snapshot()
                if not self._drain(block=idle):
                    break
                if self._engine.has_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 the thread is the process: everything must be reported
            self.error = error
            self._close("failed", error)
            self._on_down(error)
        else:
            self._close("stopped", WorkerDown("the server is shutting down"))

    def _drain(self, *, block: bool) -> bool:
        """Runs the queued commands; False once told to stop."""
        while True:
            try:
                what, handle = self._commands.get(block=block)
            except queue.Empty:
                return True
            if handle is None:
                return False
            if what == "submit":
                self._submit(handle)
            else:
                self._cancel(handle)
            block = False

    def _submit(self, handle: Handle) -> None:
        if handle.cancelled or not handle.accepted.set_running_or_notify_cancel():
            return
        try:
            handle.id = self._engine.submit(handle.request)
        except Exception as error:  # noqa: BLE001 whatever it is, it belongs to this request
            handle.accepted.set_exception(error)
            return
        self._live[handle.id] = handle
        handle.accepted.set_result(None)

    def _cancel(self, handle: Handle) -> None:
        if handle.id is not None and self._live.pop(handle.id, None) is not None:
            self._engine.cancel(handle.id)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:  # noqa: BLE001
            self._contain(error)
            return
        self._failed_steps = 0
        for event in events:
            handle = self._live.get(event.id)
            if handle is None:  # cancelled meanwhile
                continue
            if event.finished:
                del self._live[event.id]
            self._tell(handle, event)
        if time.monotonic() - self._counters_at > _COUNTERS_EVERY_S:
            self._snapshot()

    def _tell(self, handle: Handle, item: Any) -> None:
        try:
            handle.sink(item)
        except Exception:  # noqa: BLE001 a listener that is gone must not stop the others
            logger.debug("the listener of request %s is gone", handle.id, exc_info=True)
            self._cancel(handle)

    def _contain(self, error: Exception) -> None:
        """After a failed step: all requests get the error and leave; raises where that does not help."""
        logger.exception("a step of the engine failed; %d requests are ended", len(self._live))
        self._failed_steps += 1
        handles, self._live = list(self._live.values()), {}
        for handle in handles:  # told first: what follows may raise
            self._tell(handle, error)
        self._engine.reset()
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _snapshot(self) -> None:
        self._counters = dict(self._engine.counters())
        self._counters_at = time.monotonic()

    def _close(self, state: State, error: BaseException) -> None:
        with self._lock:
            self._state = state
        while True:  # nothing is put any more
            try:
                what, handle = self._commands.get_nowait()
            except queue.Empty:
                break
            if what == "submit" and handle is not None and handle.accepted.set_running_or_notify_cancel():
                handle.accepted.set_exception(WorkerDown(str(error)))
        handles, self._live = list(self._live.values()), {}
        for handle in handles:
            self._tell(handle, error)
