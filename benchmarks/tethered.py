"""A child process that does not outlive its parent, whatever ends that one (Linux).

    python benchmarks/tethered.py PARENT CORES COMMAND ...

sets itself up and becomes COMMAND: same process, so its CPU time is COMMAND's. PARENT is the number of the process that
must live on, CORES those that may be used (``0,1``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
PATIENCE_S = 30.0
"""For a child that was asked to end; then it is killed."""


def start(command: Sequence[str], *, cores: Sequence[int], cwd: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts ``command`` on ``cores``. It gets SIGTERM when the calling thread ends, be it by SIGKILL."""
    # Not by preexec_fn, which may deadlock in a process with threads, as every one with JAX is.
    own = [sys.executable, os.path.abspath(__file__), str(os.getpid()), ",".join(map(str, cores))]
    return subprocess.Popen([*own, *command], cwd=cwd, env=dict(env))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a child that still runs, and waits for it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: Sequence[str]) -> None:
    parent, cores, *command = argv
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it ended before that was set
        sys.exit(128 + signal.SIGTERM)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
