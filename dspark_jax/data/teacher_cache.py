"""What a teacher said about records, on disk: final hidden states and taps in float16, never logits.

A folder holds ``index.json`` and shards ``states-00000.bin``: the rows ``[n, (1 + m) * d]`` of some records, one behind
the other, final state first. The index says what the states belong to (``header``), and of every shard its records,
their lengths and a checksum. It is replaced after each shard, so that a folder whose making was interrupted is whole as
far as it goes.

m taps, d hidden size, L sequence length, B records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.data.line_file import differences, known
from dspark_jax.whole_file import write_whole

INDEX = "index.json"
DTYPE = np.dtype("<f2")
NEWER = ("digest",)
"""What the headers of earlier versions do not say."""
COMMAND = "scripts/cache_teacher.py"


class DamagedShard(RuntimeError):
    """A shard is not what was written; the message names its file and what to do."""


class TeacherCache:
    """Reads a folder.

    Args:
        header: what the states must belong to, as ``TeacherCacheWriter`` was given it.

    Raises:
        FileNotFoundError: there is no index.
        ValueError: the states are of something else; every difference is listed.
    """

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        index = read_index(self.folder)
        if index is None:
            raise FileNotFoundError(f"{self.folder / INDEX}: no cached teacher states here; {COMMAND} makes them")
        check_header(self.folder, index, header)
        self.header, self.shards = index["header"], index["shards"]
        self._place = {record: (s, i) for s, shard in enumerate(self.shards) for i, record in enumerate(shard["ids"])}
        self._open: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._place)

    def require(self, ids: Sequence[int] | np.ndarray) -> None:
        """Raises ValueError where states of some of these records are missing."""
        missing = [int(record) for record in ids if int(record) not in self._place]
        if missing:
            raise ValueError(
                f"{self.folder}: of {len(ids)} records the states of {len(missing)} are missing, the first is record "
                f"{missing[0]}; make more with {COMMAND}, or train without data.teacher_cache"
            )

    def states(self, ids: Sequence[int] | np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Final states ``[B, L, d]`` and taps ``[B, L, m * d]`` of records, float16; 0 behind their ends.

        Raises ValueError for a record that is not there, DamagedShard.
        """
        self.require(ids)
        d, m = self.header["hidden_size"], len(self.header["taps"])
        out = np.zeros((len(ids), length, (1 + m) * d), DTYPE)
        for row, record in enumerate(ids):
            number, i = self._place[int(record)]
            shard, lengths = self._shard(number), self.shards[number]["lengths"]
            begin, n = sum(lengths[:i]), min(lengths[i], length)
            out[row, :n] = shard[begin : begin + n]
        return out[..., :d], out[..., d:]

    def _shard(self, number: int) -> np.ndarray:
        """``[rows, (1 + m) * d]``, checked when it is opened; one is open at a time."""
        if self._open is None or self._open[0] != number:
            entry = self.shards[number]
            path = self.folder / entry["file"]
            problem = damage(path, entry)
            if problem:
                raise DamagedShard(f"{path}: {problem}; delete it and run {COMMAND} again, which makes it anew")
            rows = np.memmap(path, DTYPE, mode="r").reshape(sum(entry["lengths"]), -1)
            self._open = number, rows
        return self._open[1]


class TeacherCacheWriter:
    """Makes or goes on with a folder. Raises ValueError where it holds states of something else."""

    def __init__(self, folder: str | Path, header: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        index = read_index(self.folder)
        if index is not None:
            check_header(self.folder, index, header)
        self._header = json.loads(json.dumps(header)) if index is None else index["header"]
        self._shards: list[dict[str, Any]] = [] if index is None else index["shards"]

    @property
    def begin(self) -> int | None:
        """The first record of the folder, None where it holds none."""
        return self._shards[0]["ids"][0] if self._shards else None

    def has(self, number: int, ids: Sequence[int]) -> bool:
        """Shard ``number`` holds these records and is sound."""
        if number >= len(self._shards):
            return False
        entry = self._shards[number]
        return entry["ids"] == list(ids) and damage(self.folder / entry["file"], entry) is None

    def write(self, number: int, ids: Sequence[int], states: Sequence[np.ndarray]) -> None:
        """Writes shard ``number`` (at most one behind the last) of records with ``states [n, (1 + m) * d]`` each.

        Raises ValueError for a state beyond float16's range.
        """
        rows = np.concatenate([np.asarray(x) for x in states])
        with np.errstate(over="ignore"):
            small = rows.astype(DTYPE)
        if not np.isfinite(small).all():
            raise ValueError(
                f"records {ids[0]}..{ids[-1]}: states of up to {np.abs(rows).max():.3g} do not fit into float16; train "
                "without data.teacher_cache"
            )
        content = small.tobytes()
        path = self.folder / f"states-{number:05d}.bin"
        write_whole(path, content)
        entry: dict[str, Any] = {"file": path.name, "ids": list(map(int, ids)), "lengths": [len(x) for x in states]}
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self._shards[number : number + 1] = [entry]
        index = {"header": self._header, "shards": self._shards}
        write_whole(self.folder / INDEX, (json.dumps(index) + "\n").encode())


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index, None where there is none. Raises ValueError naming a broken one."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {"header": dict(index["header"]), "shards": list(index["shards"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not an index of teacher states ({error}); delete it and run {COMMAND}") from None


def check_header(folder: Path, index: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raises ValueError listing what the states belong to and what they should."""
    wrong = differences(index["header"], known(json.loads(json.dumps(header)), index["header"], NEWER))
    if wrong:
        raise ValueError(
            f"{folder} holds teacher states of something else: {'; '.join(wrong)}. Give another folder, or delete this "
            f"one and run {COMMAND}"
        )


def damage(path: Path, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with a shard's file, None if nothing."""
    if not path.is_file():
        return "no such file"
    if path.stat().st_size != entry["bytes"]:
        return f"{path.stat().st_size} bytes, {entry['bytes']} were written"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return None if digest.hexdigest() == entry["sha256"] else "damaged (its checksum is another one)"


def records_digest(tokens: np.ndarray, offsets: np.ndarray) -> str:
    """Short hash of a folder of records: its text and where every record begins."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens))
    digest.update(np.ascontiguousarray(offsets))
    return digest.hexdigest()[:16]
