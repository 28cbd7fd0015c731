"""``kill -9`` at any moment and a restart: bit for bit the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLS = 24, 3


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A training process; its compilations are shared through a cache."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.train.tiny_run", str(folder), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str], limit_s: float = 900.0) -> str:
    output, _ = process.communicate(timeout=limit_s)
    assert process.returncode == 0, output
    return output


def lines(folder: Path) -> list[dict[str, Any]]:
    """The steps' lines without what a clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "seconds_per_step")} for line in found if "ce" in line]


def final(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint."""
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == STEPS
        state = manager.restore(STEPS, args=ocp.args.StandardRestore())
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # orbax: restored without a template
def test_a_run_killed_at_any_moment_ends_like_one_that_never_was(tmp_path: Path) -> None:
    """Checkpoints are written at every step, so that kills meet steps, saves and the deletion of old checkpoints. The
    last checkpoint (parameters, moments, key, cursor) and every line of the metrics are equal."""
    whole = tmp_path / "whole"
    finish(start(whole, "--steps", str(STEPS)))
    rng = random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(KILLS):
        process = start(killed, "--steps", str(STEPS))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        time.sleep(rng.uniform(0.5, 4.0))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(killed, "--steps", str(STEPS)))
    assert lines(killed) == lines(whole) and [line["step"] for line in lines(whole)] == list(range(1, STEPS + 1))
    a, b = final(whole), final(killed)
    assert a.keys() == b.keys() and len(a) > 10
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
