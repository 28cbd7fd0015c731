"""Which text a run has read: what a resumed run, and one that starts from its drafter, must find again.

A cursor counts usable records, so it means something only together with the text and with what makes a record usable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.checkpoint.drafter_files import read_config
from dspark_jax.data.records import Records
from dspark_jax.load import find_drafter
from dspark_jax.train.config import DataConfig

LOG = logging.getLogger("dspark_jax.data")


def said_of_training(name: str) -> dict[str, Any]:
    """What the drafter ``name`` (shipped, a folder, a hub id in the local cache) says of its training: ``records`` that
    it has read and, where it says so, the ``identity`` of that text.

    Raises FileNotFoundError where there is none, ValueError where it does not say how many records."""
    place = find_drafter(name)
    training = read_config(place).get("training")
    if not isinstance(training, dict) or not isinstance(training.get("records"), int):
        raise ValueError(f"{place}: its config.json does not say how many records it has seen (training.records)")
    return training


def texts_read(training: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ``identity`` of every text that a drafter says it has read: its own run's, then those of the runs before
    (``earlier``). Empty where it does not say."""
    earlier = training.get("earlier")
    said = [training, *(earlier if isinstance(earlier, list) else [])]
    names = ("records", "text", "length", "least_learnt")
    return [
        {name: text.get(name) for name in names}
        for text in said
        if isinstance(text, Mapping) and isinstance(text.get("records"), int) and isinstance(text.get("text"), str)
    ]


def records_read(data: DataConfig, drafter: str) -> int | None:
    """How many usable records of ``data.train`` the drafter of that name has read (``ReadText.read_of``), as its
    config.json says; None where it has read other text.

    Raises FileNotFoundError where there is no such drafter or text, ValueError where it does not say.
    """
    known, records = said_of_training(drafter), Records(data.train)
    if not texts_read(known):
        LOG.warning("%s says that it has read %d records, not of which text: see that %s is it", drafter,
                    known["records"], data.train)  # fmt: skip
        return int(known["records"])
    return ReadText(records, records.usable(data.length, data.least_learnt), data).read_of(known)


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

    def read_of(self, training: Mapping[str, Any]) -> int | None:
        """How many usable records of this text lie before the end of what a drafter has read, as it says of its
        training, be it with another ``length`` or ``least_learnt``; None: it has read none, as far as it says."""
        ends = [end for text in texts_read(training) if (end := self._end(text)) is not None]
        return int(np.searchsorted(self._usable, max(ends))) if ends else None

    def _end(self, text: Mapping[str, Any]) -> int | None:
        """The record behind the last one that ``text`` (of ``texts_read``) speaks of; None where it is other text."""
        try:
            data = dataclasses.replace(self._data, length=text["length"], least_learnt=text["least_learnt"])
        except (TypeError, ValueError):  # anybody may have written something there
            return None
        usable = self._records.usable(data.length, data.least_learnt)
        if not ReadText(self._records, usable, data).is_same(text):
            return None
        return int(usable[text["records"] - 1]) + 1 if text["records"] else 0

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

    def doubt(self, training: Mapping[str, Any], first: int) -> str | None:
        """A line on what is odd about passing over ``first`` records after a drafter that says so of its training, None
        where nothing is, or the drafter does not say enough."""
        texts = texts_read(training)
        if not texts:
            return None
        train, count = self._data.train, self.read_of(training)
        if count is not None:
            if first >= count:
                return None
            return (
                f"data.first = {first}: the drafter has read the first {count} usable records of {train}; text is "
                f"repeated unless data.first = {count}"
            )
        if not first:
            return None
        known = texts[0]
        return (
            f"data.first = {first} passes over records of {train}, which is not the text that the drafter has read "
            f"{known['records']} records of (with length = {known['length']}, least_learnt = {known['least_learnt']})"
        )
