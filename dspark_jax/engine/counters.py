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
    "draft_rows",  # of the draft programs that ran, padding included
    "scheduled",  # drafts admitted to a forward
    "offered",  # of those the ones of requests that were still at work
    "trimmed",  # drafted and not offered
    "regretted",  # trimmed, and then emitted at their place
    "accepted",
    "committed",
    "tokens_computed",  # flat tokens of the decoding forwards, padding included
    "padding_tokens",
    "skipped_drafts",  # requests that a cycle did not draft for
    "probes",  # cycles of a skipping engine that drafted to look again
    "fallback_cycles",  # of mode current that did as lagged
    "absorbed_later",  # tokens that the drafter absorbed when drafting resumed
    "predicted_milliseconds",  # of the cycles that were measured too
    "measured_milliseconds",
    "moves",
    "prefix_cache_queries",  # prompt tokens looked up, as in vLLM
    "prefix_cache_hits",  # of those the ones that were found
    "prefix_cache_refused",  # saved blocks that were not finite, and were forgotten
    "preemptions",
)


class Counters:
    """Numbers that only grow, and how often each decoding program ran."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(NAMES, 0)
        self.buckets: Counter[str] = Counter()
        self.budgets: Counter[str] = Counter()  # requests by the drafts verified for them in a cycle

    def add(self, name: str, number: float = 1) -> None:
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
        """Every number by name; ``buckets`` and ``budgets`` are mappings themselves."""
        return {**self.counts, "buckets": dict(self.buckets), "budgets": dict(self.budgets)}
