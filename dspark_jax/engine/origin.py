"""Where step times are measured: machine, device, commit and model, as ``StepTimeTable`` compares them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from dspark_jax.types import PyTree


def origin(target: Any, drafter: Any) -> dict[str, str]:
    """The five fields of a ``StepTimeTable`` that say where it comes from."""
    devices = jax.devices()
    leaves = [leaf for leaf in jax.tree.leaves(target) if hasattr(leaf, "dtype")]
    dtype = getattr(target, "dtype", None) or leaves[0].dtype
    return {
        "machine": f"{processor()}, {usable_cores()} cores",
        "device": f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}",
        "dtype": str(dtype),
        "commit": _commit(),
        "model_hash": model_hash(target, drafter),
    }


def model_hash(*models: PyTree) -> str:
    """Of shapes, dtypes and settings. The values of weights do not matter for times."""
    digest = hashlib.sha256()
    for model in models:
        for path, leaf in jax.tree_util.tree_leaves_with_path(model):
            digest.update(f"{jax.tree_util.keystr(path)} {_shape(leaf)}\n".encode())
        digest.update(f"{getattr(model, 'config', None)!r}\n".encode())
    return digest.hexdigest()[:16]


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


def processor() -> str:
    """The processor's own name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str:
    """The working tree's commit; outside of one the installed version."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return importlib.metadata.version("dspark_jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
