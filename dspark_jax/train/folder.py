"""The folder of a run: its configuration, environment and metrics, written so that a kill leaves nothing half."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.train.config import TrainConfig
from dspark_jax.whole_file import write_whole

LOG = logging.getLogger("dspark_jax.train")

MAY_CHANGE = ("optim.total_steps", "optim.decay_steps", "run.", "data.", "devices")
"""What a run may be continued with; everything else would make it another run. That ``data.`` still means the text that
was read is checked with the checkpoint (``read_text.py``)."""
MUST_STAY = ("data.first:",)
"""Of those: the cursor of a run that goes on no longer looks at it."""


def has_checkpoint(folder: Path) -> bool:
    """A run's folder holds a whole checkpoint; one that a kill left half-written has another name."""
    return any(path.name.isdigit() for path in (folder / "checkpoints").glob("*"))


_HELD: dict[Path, int] = {}
"""Locks of this process by folder, as open file descriptors: they end with it, however it ends."""


def hold(folder: Path) -> None:
    """Makes this process the only one that trains in ``folder``, until it ends; another Run of it may follow.

    Raises ValueError, naming the folder and the process, where another process has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / "lock"
    known = _HELD.get(path)
    if known is not None:
        if path.exists() and os.path.samestat(os.fstat(known), path.stat()):
            return
        os.close(known)  # the folder was deleted since
        del _HELD[path]
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 20, 0).decode().strip()
        os.close(file)
        raise ValueError(
            f"{folder}: process {owner or 'unknown'} is training here; wait for it, stop it, or take another folder"
        ) from None
    except OSError as error:  # some network file systems have no locks
        LOG.warning("%s cannot be locked (%s): see to it that nothing else trains here", folder, error)
    _HELD[path] = file
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)


def check_same(config: TrainConfig, folder: Path, *, write: bool = True) -> None:
    """Writes the configuration, or compares it with that of the run to be continued.

    A setting that the folder's version did not know yet counts as its default. Raises ValueError listing what
    differs.
    """
    path = folder / "config.json"
    mine = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    if path.is_file():
        a, b = flat(mine), flat(json.loads(path.read_text(encoding="utf-8")))
        b = {**{k: v for k, v in defaults(type(config)).items() if k not in b}, **b}
        if not b.get("drafter.draft_vocab"):  # there it played no part, and is no longer taken
            b["drafter.bigram_start"] = False
        wrong = [f"{k}: {b.get(k)!r} -> {a.get(k)!r}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        wrong = [line for line in wrong if not line.startswith(MAY_CHANGE) or line.startswith(MUST_STAY)]
        if wrong:
            raise ValueError(f"{folder} holds another run: " + "; ".join(wrong))
    if write:
        write_whole(path, json.dumps(mine, indent=2) + "\n")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def defaults(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The flat defaults of a configuration's fields; fields without one are left out."""
    out: dict[str, Any] = {}
    hints = kind.__dataclass_fields__
    types = {name: _dataclass_of(kind, name) for name in hints}
    for name, field in hints.items():
        if types[name] is not None:
            out |= defaults(types[name], f"{prefix}{name}.")
        elif field.default is not dataclasses.MISSING:
            out[prefix + name] = json.loads(json.dumps(field.default, default=str))
    return out


def _dataclass_of(kind: Any, name: str) -> Any:
    import typing

    hint = typing.get_type_hints(kind)[name]
    return hint if dataclasses.is_dataclass(hint) else None


def environment() -> dict[str, Any]:
    """Machine, versions and command of this process."""
    versions = {}
    for package in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # not installed as a distribution
            continue
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "host": platform.platform(),
        "cores": os.cpu_count(),
        "devices": [str(device) for device in jax.devices()],
        "processes": jax.process_count(),
    }


class Metrics:
    """``metrics.jsonl``, and TensorBoard files where asked for.

    Args:
        step: the step the run goes on from: lines of later steps, and a line cut off by a kill, are dropped, since the
            run is about to write them again.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in _whole_lines(self.path) if int(line.get("step", 0)) <= step and step > 0]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board: Any = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                LOG.warning("no TensorBoard files: tensorboardX is not installed")
            else:
                # Of earlier starts, events from this step on are not shown; those of the last line kept are.
                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else 0)

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes one line; the time is added."""
        text = json.dumps({**line, "time": time.strftime("%Y-%m-%d %H:%M:%S")})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        LOG.info("%s", text)
        if self._board is not None:
            for key, value in flat(line).items():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key.replace(".", "/"), value, int(line["step"]))
            self._board.flush()

    def close(self) -> None:
        """Closes the TensorBoard files."""
        if self._board is not None:
            self._board.close()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # behind the last line break: nothing, or a cut line
    return [json.loads(line) for line in lines if line.strip()]


def vocabulary_of_checkpoint(path: Path, beside: Mapping[str, Any]) -> np.ndarray:
    """The draft vocabulary ``[Vd]`` that a run's last checkpoint was trained with: the one it holds, or, of a version
    that kept none there, the file's.

    Args:
        path: ``d2t.npy`` of the run. beside: what the checkpoint says beside its arrays.

    Raises:
        ValueError: the file holds another one, or is missing where only it could say.
    """
    if "d2t" in beside:  # what the parameters mean belongs to them
        d2t = np.asarray(beside["d2t"], np.int32)
        if path.is_file() and not np.array_equal(np.load(path), d2t):
            raise ValueError(
                f"{path}: not the draft vocabulary that the checkpoint was trained with; delete the file, and it is "
                "written anew from the checkpoint"
            )
        return d2t
    if not path.is_file():
        raise ValueError(
            f"{path}: the draft vocabulary is missing, and a checkpoint of an older version does not hold it; without "
            "it the parameters mean nothing. Put the file back"
        )
    found: np.ndarray = np.load(path)
    return found
