"""One server of several processes: they meet, notice when one is gone, and part."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from dspark_jax.serve.args import ServeArgs, UsageError

LEAVE_S = 5.0
"""Seconds that processes which part in peace wait for each other."""


class Processes:
    """This process's part in the server. Without others (``--nnodes 1``) nothing here does anything.

    Args:
        on_lost: called in a thread of its own with a line, once another process is gone. What is under way on the
            devices may then never end.
    """

    def __init__(self, on_lost: Callable[[str], None] = lambda line: None) -> None:
        self._on_lost = on_lost
        self._lost = False
        self.link: Any = None  # engine.multiprocess.Link, from ``connect`` on

    def join(self, args: ServeArgs, say: Callable[[str], None]) -> None:
        """Meets the other processes, before any device is touched.

        Raises:
            UsageError: process 0 cannot listen where the others are to find it.
        """
        import jax

        if args.nnodes == 1 or jax.distributed.is_initialized():
            return
        if args.node_rank == 0:
            _require_free(args.master_port)
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            # Process 0 alone reads the cache, and Gloo gives up on a process that compiles for 30 s longer.
            jax.config.update("jax_enable_compilation_cache", False)
        # It would take SIGTERM for itself, and the server would never hear of it.
        jax.config.update("jax_enable_preemption_service", False)
        others = "the other processes" if args.node_rank == 0 else "process 0"
        say(f"waiting for {others} at {args.master_addr}:{args.master_port}")
        jax.distributed.initialize(f"{args.master_addr}:{args.master_port}", args.nnodes, args.node_rank)

    def connect(self, args: ServeArgs) -> Any:
        """The line between process 0 and the others; None where there is one process."""
        if args.nnodes == 1:
            return None
        from dspark_jax.engine.multiprocess import connect

        self.link = connect(args.master_addr)
        if self.link is not None and self.link.leads:
            self.link.watch(self._gone)
        return self.link

    def leave(self) -> None:
        """Sends the others home, if this is process 0 and all are there, and parts from them. The device must be
        idle. Does not wait for ever."""
        if self.link is None or self._lost:
            return
        import jax

        self.link.close()
        parting = threading.Thread(target=jax.distributed.shutdown, name="dspark-leave", daemon=True)
        parting.start()
        parting.join(LEAVE_S)

    def _gone(self, rank: int) -> None:
        self._lost = True
        self._on_lost(f"process {rank} is gone, and this one cannot go on alone: start all of them again")


def _require_free(port: int) -> None:
    """Raises UsageError where nobody can listen at ``port``, at all addresses of this machine as JAX does. JAX itself
    would end this process without a word."""
    both = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        ).close()
    except OSError as error:
        raise UsageError(
            f"argument --master-port: process 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}): give "
            "all processes another one"
        ) from error
