"""Which text a run has read: what a resumed run, and one that starts from its drafter, must find again.

A cursor counts usable records, so it means something only together with the text and with what makes a record usable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.checkpoint.drafter_files import read_config
from dspark_jax.data.records import Records
from dspark_jax.load import find_drafter
from dspark_jax.train.config import DataConfig


def said_of_training(name: str) -> dict[str, Any]:
    """What the drafter ``name`` (shipped, a folder, a hub id in the local cache) says of its training: ``records`` that
    it has read and, where it says so, the ``identity`` of that text.

    Raises FileNotFoundError where there is none, ValueError where it does not say how many records."""
    place = find_drafter(name)
    training = read_config(place).get("training")
    if not isinstance(training, dict) or not isinstance(training.get("records"), int):
        raise ValueError(f"{place}: its config.json does not say how many records it has seen (training.records)")
    return training


class ReadText:
    """The training text of a run and its usable records, in the order they are read.

    A folder may move, and a text may grow behind what was read: both are the same text.
    """

    def __init__(self, records: Records, usable: np.ndarray, data: DataConfig) -> None:
        self._records, self._usable, self._data = records, usable, data
        self._hashed, self._tokens = 0, hashlib.sha256()

    def identity(self, cursor: int) -> dict[str, Any]:
        """What says which text the first ``cursor`` usable records are, as JSON."""
        data = self._data
        return {
            "records": cursor,
            "text": self._digest(cursor),
            "length": data.length,
            "least_learnt": data.least_learnt,
        }

    def _digest(self, cursor: int) -> str:
        """Short hash of the text up to the last record that was read, and of which of its records those are."""
        read, records = self._usable[:cursor], self._records
        end = int(read[-1]) + 1 if len(read) else 0
        if end < self._hashed:
            self._hashed, self._tokens = 0, hashlib.sha256()
        self._tokens.update(np.ascontiguousarray(records.tokens[records.offsets[self._hashed] : records.offsets[end]]))
        self._hashed = end
        where = np.ascontiguousarray(read, np.int64), np.ascontiguousarray(records.offsets[: end + 1], np.int64)
        return hashlib.sha256(self._tokens.digest() + b"".join(x.tobytes() for x in where)).hexdigest()[:16]

    def is_same(self, known: Mapping[str, Any]) -> bool:
        """The first ``known["records"]`` usable records are those that ``known`` (an ``identity``) was made of."""
        count = known["records"]
        return count <= len(self._usable) and self._digest(count) == known["text"]

    def require(self, known: Mapping[str, Any]) -> None:
        """Raises ValueError where a checkpoint's cursor would point into another text; ``known``: its identity."""
        if self.is_same(known):
            return
        mine, data = self.identity(0), self._data
        changed = [
            f"data.{name}: {known[name]} -> {mine[name]}"
            for name in ("length", "least_learnt")
            if known.get(name) != mine[name]
        ]
        raise ValueError(
            f"{data.train}: the first {known['records']} usable records are not those that this run has read "
            f"({'; '.join(changed) or 'another text'}), so it would repeat some and miss others; give it its text and "
            "settings again, or begin another run with drafter.start_from"
        )

    def doubt(self, known: Mapping[str, Any], first: int) -> str | None:
        """A line on what is odd about passing over ``first`` records after a drafter that says it has read ``known``,
        None where nothing is, or the drafter does not say enough."""
        count = known.get("records")
        if not isinstance(count, int) or not isinstance(known.get("text"), str):
            return None
        train = self._data.train
        if self.is_same(known):
            if first >= count:
                return None
            return (
                f"data.first = {first}: the drafter has read the first {count} usable records of {train}; text is "
                f"repeated unless data.first = {count}"
            )
        if not first:
            return None
        return (
            f"data.first = {first} passes over records of {train}, which is not the text that the drafter has read "
            f"{count} records of (with length = {known.get('length')}, least_learnt = {known.get('least_learnt')})"
        )
