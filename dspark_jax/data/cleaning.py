"""Repeats and overlap with evaluation sets, found by normalised words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+")
OVERLAP_WORDS = 13
"""Words in a row that two texts must share to count as overlapping; shorter evaluation prompts are compared whole."""


def words(text: str) -> list[str]:
    """Lower-case words and numbers; everything between them is dropped."""
    return _WORD.findall(text.lower())


def _digest(parts: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest()


class Seen:
    """Remembers texts by their words; spacing, case and punctuation make no difference."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def add(self, text: str) -> bool:
        """True if the text is new."""
        digest = _digest(words(text))
        new = digest not in self._known
        self._known.add(digest)
        return new


class Overlap:
    """Tells whether a text shares ``OVERLAP_WORDS`` words in a row with one of ``texts`` (evaluation prompts).

    A prompt with fewer words overlaps where the text contains all of it, in a row.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams: dict[int, set[bytes]] = {}
        for text in texts:
            found = words(text)
            size = min(len(found), OVERLAP_WORDS)
            for i in range(len(found) - size + 1 if size else 0):
                self._grams.setdefault(size, set()).add(_digest(found[i : i + size]))

    def __contains__(self, text: str) -> bool:
        found = words(text)
        return any(
            _digest(found[i : i + size]) in grams
            for size, grams in self._grams.items()
            for i in range(len(found) - size + 1)
        )
