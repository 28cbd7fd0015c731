"""Tokens to text, one at a time: whole characters only, stop strings cut wherever they fall.

What comes out depends on the tokens alone, never on how they were grouped into blocks, and joined together
it is what ``tokenizer.decode(tokens, skip_special_tokens=True)`` gives.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most 4 bytes: that many undecodable tokens in a row are not the start of one.
_MAX_PENDING_TOKENS = 6


class Detokenizer(Protocol):
    """Text of one request's tokens."""

    def push(self, token: int) -> str:
        """The characters that ``token`` completes."""

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character."""


class NoText:
    """For models without a tokenizer: no text at all."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2's alphabet): tokens are bytes, a UTF-8 decoder holds back what is
    no whole character yet."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer (sentencepiece and the like): decodes a short window twice and takes the
    difference, because spaces there depend on the token before."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens whose text is out, then pending ones
        self._done = 0  # how many of the window are out

    def push(self, token: int) -> str:
        self._window.append(token)
        return self._take(len(self._window) - self._done > _MAX_PENDING_TOKENS)

    def flush(self) -> str:
        return self._take(True)

    def _take(self, force: bool) -> str:
        before = self._decode(self._window[: self._done])
        text = self._decode(self._window)
        if not force and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return text[len(before) :]


def detokenizer_factory(tokenizer: Any | None) -> Callable[[], Detokenizer]:
    """A maker of detokenizers for a transformers tokenizer (None: no text), one call a request."""
    if tokenizer is None:
        return NoText
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if added.special:
            special.add(int(token))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "decoder", None)).__name__ == "ByteLevel":
        table = _TokenBytes(backend, special)
        return lambda: ByteLevelDetokenizer(table)

    def decode(tokens: Sequence[int]) -> str:
        shown = [t for t in tokens if t not in special]
        return tokenizer.decode(shown, clean_up_tokenization_spaces=False) if shown else ""

    return lambda: WindowDetokenizer(decode)


class _TokenBytes:
    """Bytes of a token, remembered: special tokens and unknown ids have none."""

    def __init__(self, backend: Any, special: set[int]) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = dict.fromkeys(special, b"")
        self._byte_of = _byte_alphabet()

    def __call__(self, token: int) -> bytes:
        found = self._known.get(token)
        if found is None:
            piece = self._backend.id_to_token(token) or ""
            try:
                found = bytes(self._byte_of[c] for c in piece)
            except KeyError:  # an added token outside the alphabet stands for itself
                found = piece.encode("utf-8")
            self._known[token] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: visible Latin-1 characters are themselves, the others
    are the characters from U+0100 on, in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(b): b for b in visible}
    hidden = (b for b in range(256) if b not in visible)
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(hidden)}


class StopStrings:
    """Finds stop strings in text that arrives in pieces and holds back what may become one.

    The stop string that is *completed* first ends the text (of several completed by the same character, the
    longest), so the answer does not depend on how the text was cut into pieces. One Knuth-Morris-Pratt
    automaton a stop string: constant time a character, amortised.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._failure = [_failure_table(s) for s in self._stops]
        self._state = [0] * len(self._stops)  # characters of each stop string matched so far
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown now; after a hit it ends before the stop string, and nothing follows."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        start = len(self._held)
        self._held += text
        for end in range(start + 1, len(self._held) + 1):
            hit = self._advance(self._held[end - 1])
            if hit is not None:
                shown = self._held[: end - len(hit)]
                self.hit, self._held = hit, ""
                return shown
        keep = max(self._state)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back in vain: the text has ended."""
        shown, self._held = self._held, ""
        self._state = [0] * len(self._stops)
        return shown

    def _advance(self, char: str) -> str | None:
        """The longest stop string that ends with this character, or None."""
        hit = None
        for i, stop in enumerate(self._stops):
            k, failure = self._state[i], self._failure[i]
            while k and stop[k] != char:
                k = failure[k - 1]
            k += stop[k] == char
            self._state[i] = k
            if k == len(stop) and (hit is None or k > len(hit)):
                hit = stop
        return hit


def _failure_table(stop: str) -> list[int]:
    """Length of the longest proper border of every prefix (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    k = 0
    for i in range(1, len(stop)):
        while k and stop[i] != stop[k]:
            k = table[k - 1]
        k += stop[i] == stop[k]
        table[i] = k
    return table
