"""What every result file says of the run that made it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from dspark_jax.command_line import exit_status
from dspark_jax.engine.origin import processor, usable_cores

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str | None:
    """Commit of the working tree, with a + where it has changes; None outside a repository. Results are no changes:
    a run that goes on finds its own ones."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def environment() -> dict[str, Any]:
    """Machine, versions, commit, command, and how busy the machine was at the start."""
    return {
        "command": shlex.join(["python", *(os.path.relpath(a, ROOT) if a.endswith(".py") else a for a in sys.argv)]),
        "commit": commit(),
        "processor": processor(),
        "cores": usable_cores(),
        "device": str(jax.devices()[0]),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def write(path: str | None, result: dict[str, Any]) -> None:
    """Prints a result, and writes it where asked to. Raises SystemExit where that cannot be written."""
    text = json.dumps(result, indent=1)
    print(text)
    if path:
        place = Path(path)

        def save() -> None:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")

        if status := exit_status(save):
            raise SystemExit(status)
