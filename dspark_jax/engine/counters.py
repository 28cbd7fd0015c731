"""What an engine counts, from its start on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dspark_jax.engine.buckets import Key, Piece
from dspark_jax.engine.steps import Emitted

NAMES = (
    "requests",
    "finished",
    "cancelled",
    "failed",  # by logits that are not finite
    "tokens",  # emitted
    "prompt_tokens",
    "prefill_pieces",
    "prefill_padding_tokens",
    "cycles",
    "drafted",
    "offered",
    "accepted",
    "committed",
    "tokens_computed",  # flat tokens of the decoding forwards, padding included
    "padding_tokens",
    "skipped_drafts",  # requests in cycles without drafts
    "moves",
)


class Counters:
    """Numbers that only grow, and how often each decoding program ran."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.buckets: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def prefill(self, piece: Piece) -> None:
        self.add("prefill_pieces")
        self.add("prompt_tokens", piece.count)
        self.add("prefill_padding_tokens", piece.size - piece.count)

    def cycle(self, key: Key, useful: int) -> None:
        """A decoding forward of which ``useful`` flat tokens were wanted."""
        self.add("cycles")
        self.add("tokens_computed", key.tokens)
        self.add("padding_tokens", key.tokens - useful)
        self.buckets[str(key)] += 1

    def commit(self, out: Emitted, row: int) -> None:
        self.add("committed", int(out.count[row]))
        self.add("offered", int(out.offered[row]))
        self.add("accepted", int(out.accepted[row]))

    def snapshot(self) -> dict[str, Any]:
        """Every number by name; ``buckets`` is a mapping itself."""
        return {**{name: self.counts[name] for name in NAMES}, "buckets": dict(self.buckets)}
