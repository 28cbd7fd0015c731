"""Tokenised conversations on disk: ids and loss mask, one flat file each, and where every record begins.

A folder holds ``tokens.bin`` (uint16, or uint32 for vocabularies beyond 65536), ``mask.bin`` (uint8, 1 on the
tokens a model learns to write), ``offsets.npy`` (int64 ``[N + 1]``), ``sources.npy`` (where each record comes from, if
that is known) and ``meta.json`` (how all were made). Files are memory mapped; a batch copies only what it needs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.whole_file import write_array, write_whole

TOKENS, MASK, OFFSETS, META = "tokens.bin", "mask.bin", "offsets.npy", "meta.json"
SOURCES = "sources.npy"


@dataclasses.dataclass(frozen=True)
class Batch:
    """Records cut to a common length, padded on the right with token 0 and mask False."""

    tokens: np.ndarray  # [B, L] int32
    loss_mask: np.ndarray  # [B, L] bool
    lengths: np.ndarray  # [B] int32


class Records:
    """Random access to a folder of tokenised conversations.

    Raises FileNotFoundError where a file is missing and ValueError where the files do not fit each other.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        missing = [name for name in (TOKENS, MASK, OFFSETS, META) if not (self.path / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{self.path}: no token records here, missing {', '.join(missing)}")
        self.meta: Mapping[str, Any] = json.loads((self.path / META).read_text(encoding="utf-8"))
        self.offsets = np.load(self.path / OFFSETS)
        if len(self.offsets) < 2:
            raise ValueError(f"{self.path}: an empty data set")
        self.tokens = np.memmap(self.path / TOKENS, dtype=self.meta["dtype"], mode="r")
        self.loss_mask = np.memmap(self.path / MASK, dtype=np.uint8, mode="r")
        if not len(self.tokens) == len(self.loss_mask) == self.offsets[-1]:
            raise ValueError(
                f"{self.path}: {len(self.tokens)} tokens, {len(self.loss_mask)} mask values, "
                f"but the offsets end at {self.offsets[-1]}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def fitting(self, vocab_size: int) -> Records:
        """The records themselves. Raises ValueError where they are of a larger vocabulary than ``vocab_size``."""
        known = self.meta.get("vocab_size", 0)
        if known > vocab_size:
            raise ValueError(f"{self.path}: records of {known} different tokens, but the target has {vocab_size}")
        return self

    @property
    def sources(self) -> list[str] | None:
        """Where each record comes from, as its maker named it; None where nobody wrote it down."""
        path = self.path / SOURCES
        return [name.decode() for name in np.load(path).tolist()] if path.is_file() else None

    def usable(self, length: int, least: int = 1) -> np.ndarray:
        """Ids of the records with at least ``least`` learnt tokens among their first ``length``, in file order."""
        ends = np.minimum(self.offsets[1:], self.offsets[:-1] + length)
        learnt = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        return np.flatnonzero(learnt[ends] - learnt[self.offsets[:-1]] >= least)

    def batch(self, ids: Sequence[int] | np.ndarray, length: int) -> Batch:
        """The records ``ids``, cut to ``length`` tokens. Raises IndexError for an id that is not there."""
        tokens = np.zeros((len(ids), length), np.int32)
        mask = np.zeros((len(ids), length), bool)
        lengths = np.zeros(len(ids), np.int32)
        for row, i in enumerate(ids):
            if not 0 <= i < len(self):
                raise IndexError(f"{self.path}: {len(self)} records, asked for record {i}")
            begin, end = self.offsets[i], self.offsets[i + 1]
            n = min(int(end - begin), length)
            tokens[row, :n] = self.tokens[begin : begin + n]
            mask[row, :n] = self.loss_mask[begin : begin + n]
            lengths[row] = n
        return Batch(tokens, mask, lengths)


def write_records(
    directory: str | Path,
    records: Iterable[tuple[Sequence[int], Sequence[bool]] | tuple[Sequence[int], Sequence[bool], str]],
    *,
    vocab_size: int,
    meta: Mapping[str, Any] | None = None,
) -> int:
    """Writes ``(ids, loss mask)`` pairs, or triples with the record's source; ``meta.json`` comes last, so an
    interrupted folder does not open. What the folder held is replaced when the first record has come: where that cannot
    be made it stays.

    Returns the number of records. Raises ValueError for ids and mask of unequal lengths, and where only some records
    name their source.
    """
    path, rest = Path(directory), iter(records)
    first = list(islice(rest, 1))
    path.mkdir(parents=True, exist_ok=True)
    for name in (META, SOURCES):
        (path / name).unlink(missing_ok=True)
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    offsets, sources = [0], list[str]()
    with open(path / TOKENS, "wb") as tokens, open(path / MASK, "wb") as mask:
        for ids, learn, *source in chain(first, rest):
            if len(ids) != len(learn):
                raise ValueError(f"record {len(offsets) - 1}: {len(ids)} ids, {len(learn)} mask values")
            tokens.write(np.asarray(ids, dtype).tobytes())
            mask.write(np.asarray(learn, np.uint8).tobytes())
            offsets.append(offsets[-1] + len(ids))
            sources += source
    write_array(path / OFFSETS, np.asarray(offsets, np.int64))
    content = {"dtype": dtype.name, "vocab_size": vocab_size, "records": len(offsets) - 1, **(meta or {})}
    if sources:
        if len(sources) != len(offsets) - 1:
            raise ValueError(f"{path}: {len(sources)} of {len(offsets) - 1} records name their source; all do, or none")
        write_array(path / SOURCES, np.array([name.encode() for name in sources]))
        content["conversations"] = len(set(sources))
    write_whole(path / META, json.dumps(content, indent=2) + "\n")
    return len(offsets) - 1
