"""``python -m dspark_jax.serve``: binds the port, loads in the background, serves."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import uvicorn

from dspark_jax.command_line import path_error
from dspark_jax.serve.app import create_app
from dspark_jax.serve.args import ServeArgs, UsageError, parse_args
from dspark_jax.serve.processes import Processes
from dspark_jax.serve.service import Service
from dspark_jax.serve.startup import Finished, Progress, enable_compilation_cache, load
from dspark_jax.serve.worker import EngineWorker

READY_LINE = "Application startup complete"
_FINISH_ANSWERS_S = 5  # after SIGTERM, answers under way get this long
_STOP_WORKER_S = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is told to stop. Returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("dspark_jax").setLevel(logging.INFO)  # how a checkpoint was read, late compilations
    try:
        args = parse_args(argv)
        if args.node_rank:
            return follow(args)
        listener = bind(args.host, args.port)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: cannot listen on {args.host} port {args.port}: {error.strerror or error} "
            "(--host and --port choose another place)",
            file=sys.stderr,
        )
        return 1
    with listener:
        return serve(args, listener)


def follow(args: ServeArgs) -> int:
    """Computes with process 0 until that one ends; it alone has a port. Returns the exit status.

    SIGTERM and Ctrl-C often come to all processes at once: process 0 gets the time to finish its answers, then this one
    ends in any case. While it still waits for process 0 there are no answers, and it ends at once.
    """

    processes = Processes()

    def told_to_end(number: int) -> None:
        if processes.link is not None:
            time.sleep(_FINISH_ANSWERS_S + 2 * _STOP_WORKER_S)
        _exit(128 + number)

    _at_signals(told_to_end)
    say = Progress(_print)
    try:
        enable_compilation_cache(args.compilation_cache_dir, say)
        load(args, say, processes)
    except Finished:
        return 0
    except Exception as error:  # noqa: BLE001 whatever it is, it is said and ends this process
        print(f"error: {_describe(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1
    return 1  # nothing to follow: this process is alone


def serve(args: ServeArgs, listener: socket.socket) -> int:
    """Serves on a listening socket while the engine is built in its own thread."""
    progress = Progress(_print)
    service: Service
    lost: list[str] = []

    def say(line: str) -> None:
        service.progress = line
        progress(line)

    def build() -> Any:
        enable_compilation_cache(args.compilation_cache_dir, say)
        loaded = load(args, say, processes)
        service.model = loaded.model
        return loaded.engine

    def on_ready(engine: Any) -> None:
        say(f"ready: {args.name} on {_url(listener)}")
        _print(READY_LINE)

    def on_down(error: BaseException) -> None:
        if service.model is None:  # never came up: nothing to serve
            server.should_exit = True

    def on_lost(line: str) -> None:
        lost.append(line)
        server.should_exit = True

    processes = Processes(on_lost)
    worker = EngineWorker(build, on_ready=on_ready, on_down=on_down)
    service = Service(worker)
    app = create_app(service, api_key=args.api_key, version=_version())
    # lifespan off: uvicorn would print the ready line itself, long before the engine is ready.
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level=args.uvicorn_log_level,
        timeout_graceful_shutdown=_FINISH_ANSWERS_S + _STOP_WORKER_S,
    )
    server = _Server(config, worker)
    say(f"listening on {_url(listener)}; /health answers 503 until every shape is compiled")
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again once it has shut down
    try:
        worker.start()
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
        service.close()
        # A compilation cannot be interrupted: no use in waiting for one.
        idle = worker.stop(0.0 if lost or worker.state == "starting" else _STOP_WORKER_S)
        if idle:
            processes.leave()
    if lost:
        print(f"error: {lost[0]}", file=sys.stderr, flush=True)
        return 1
    if worker.state == "failed" and service.model is None:
        print(f"error: {_describe(worker.error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(worker.error, UsageError) else 1
    return 0


class _Server(uvicorn.Server):
    """Answers that outlast the time of grace end with an error of ours instead of a broken connection."""

    def __init__(self, config: uvicorn.Config, worker: EngineWorker) -> None:
        super().__init__(config)
        self._worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(_FINISH_ANSWERS_S, self._worker.stop, 0.0)
        await super().shutdown(sockets)
        timer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow happens.

    Raises:
        OSError: the address is in use, or not ours.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _describe(error: BaseException | None) -> str:
    """One clear line for errors that name their input, a traceback for the others."""
    if isinstance(error, OSError):
        return path_error(error) or str(error)
    if isinstance(error, ValueError | ImportError | NotImplementedError):
        return str(error)
    if error is not None:
        logging.getLogger(__name__).error("the start-up failed", exc_info=error)
    return f"the start-up failed: {error!r}"


def _version() -> str:
    try:
        return importlib.metadata.version("dspark_jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read the output is gone: serve all the same
        print(line, flush=True)


def _at_signals(act: Callable[[int], None]) -> None:
    """Calls ``act`` with the signal's number, in a thread of its own, at SIGTERM and SIGINT (which a shell lets
    processes in the background ignore). A handler would have to wait until the main thread is back from what it does
    outside Python, and that may be to wait for another process. To be called from the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    asked = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) != signal.SIG_IGN]
    for number in asked:
        signal.signal(number, lambda *_: None)

    def wait(writer: socket.socket) -> None:  # which must not be closed
        while came := reader.recv(1):
            if came[0] in asked:
                act(came[0])

    threading.Thread(target=wait, args=(writer,), name="dspark-signals", daemon=True).start()


def _exit(status: int) -> NoReturn:
    """Ends the process even while the engine's thread compiles, which nothing can interrupt."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main())
