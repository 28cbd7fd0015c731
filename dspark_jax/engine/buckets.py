"""The shapes programs are compiled for, and which of them a cycle takes.

A program exists for a few sizes only: slots that take part, flat tokens of the verify forward, cells of the
cache that are read, tokens of a piece of prompt. Their number is a budget (DESIGN section 2, idea 2). The
choice below is a rule of thumb; where a mode decides by step times, ``refine.py`` spends what is left of the budget by
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dspark_jax.engine.config import EngineConfig

RING = 64
"""Tokens that a slot may hold back from the drafter: those of the longest wait for a probe."""

CELL_MULTIPLE = 16
"""Cache lengths are rounded up to it, so that rows of cells start aligned."""


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """One program. Fields that a kind does not have are 0."""

    kind: str  # admit | copy | absorb | prefill | draft | verify | plain
    slots: int = 0
    tokens: int = 0  # flat tokens of the target's forward; of a draft: its drafts a block, 0: whole blocks
    context: int = 0  # cache cells read

    def __str__(self) -> str:
        sizes = (f" {name}={size}" for name in ("slots", "tokens", "context") if (size := getattr(self, name)))
        return self.kind + "".join(sizes)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of a prompt."""

    start: int  # its first position
    count: int  # its tokens
    size: int  # tokens of its program, padding included
    context: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All sizes, each ascending; the last slot and context buckets hold everything."""

    slots: tuple[int, ...]
    contexts: tuple[int, ...]
    single: tuple[int, ...]  # finer contexts, for the target's forwards of the smallest slot bucket only
    prefill: tuple[int, ...]
    tokens: Mapping[int, tuple[int, ...]]  # verify sizes of each slot bucket; the last one bounds drafts
    drafts: int  # drafts a block; 0 without a drafter
    skips: bool  # cycles without drafts occur
    absorb_rows: int = 1  # slots that catch up in one program
    draft_contexts: tuple[int, ...] = ()  # (): those of the target
    stored_blocks: int = 0  # rows of the store of prefixes; 0: nothing is kept
    narrow: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Drafts of the narrower blocks that there are draft programs for, by slot bucket, ascending."""

    @property
    def ring(self) -> int:
        """N: places of a slot's ring, whole blocks."""
        return -(-RING // self.width) * self.width

    @property
    def cells(self) -> int:
        """L: cache cells of a slot."""
        return self.contexts[-1]

    @property
    def width(self) -> int:
        """W: anchor and drafts of a whole block."""
        return self.drafts + 1

    def slot_bucket(self, slots: int) -> int:
        return _at_least(self.slots, slots, "slots")

    def context_bucket(self, cells: int, slots: int = 0) -> int:
        """Of the target's forwards in slot bucket ``slots``; 0: of prompts."""
        return _at_least(self.contexts_of(slots), cells, "cache cells")

    def draft_context(self, cells: int) -> int:
        return _at_least(self.draft_contexts or self.contexts, cells, "cache cells")

    def contexts_of(self, slots: int) -> tuple[int, ...]:
        return self.single + self.contexts if slots == self.slots[0] else self.contexts

    def draft_width(self, slots: int, wanted: int | None) -> int | None:
        """Drafts of the block that is drafted in slot bucket ``slots`` where ``wanted`` are; None: whole blocks."""
        return wanted if wanted in self.narrow.get(slots, ()) else None

    def token_bucket(self, slots: int, tokens: int) -> int:
        """Of slot bucket ``slots``."""
        return _at_least(self.tokens[slots], tokens, "flat tokens")

    def piece(self, start: int, end: int, room: int | None = None) -> Piece:
        """The next piece of a text of ``end`` tokens, from token ``start`` on: the smallest size that holds all of
        it, or the largest that fits into ``room`` tokens (None: any number) and into the cache. The smallest size is
        always taken: a prompt gets on whatever else there is to do."""
        fitting = [
            size for size in self.prefill if start + size <= self.cells and (room is None or size <= room)
        ] or self.prefill[:1]
        size = next((size for size in fitting if size >= end - start), fitting[-1])
        return Piece(start, min(end - start, size), size, self.context_bucket(start + size))

    def keys(self, longest_prompt: int) -> list[Key]:
        """Every program that can be needed, cheap ones first."""
        found = [Key("admit")] + ([Key("copy")] if len(self.slots) > 1 or self.stored_blocks else [])
        found += [Key("absorb", self.absorb_rows)] if self.drafts and self.skips else []
        found += [Key("prefill", 0, size, context) for size, context in _prefill_shapes(self, longest_prompt)]
        for slots in self.slots:
            if self.drafts:
                widths, contexts = (*self.narrow.get(slots, ()), 0), self.draft_contexts or self.contexts
                found += [Key("draft", slots, width, context) for context in contexts for width in widths]
            for context in self.contexts_of(slots):
                if self.drafts == 0 or self.skips:
                    found.append(Key("plain", slots, slots, context))
                found += [Key("verify", slots, tokens, context) for tokens in self.tokens[slots]]
        return found


def _at_least(sizes: tuple[int, ...], wanted: int, what: str) -> int:
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"{wanted} {what} exceed the largest bucket of {sizes[-1]}")


def _prefill_shapes(buckets: Buckets, longest_prompt: int) -> list[tuple[int, int]]:
    """(size, context) of every piece that some text may have. A piece may begin anywhere: behind a prefix that is
    known, or behind pieces of other sizes."""
    shapes = []
    for smaller, size in _pairs(buckets.prefill):
        last = min(longest_prompt - smaller - 1, buckets.cells - size)  # start of the latest piece of this size
        for before, context in _pairs(buckets.contexts_of(0)):
            if max(before - size + 1, 0) <= min(context - size, last):
                shapes.append((size, context))
    return sorted(shapes)


def plan_buckets(
    config: EngineConfig,
    *,
    window: int,
    drafts: int,
    variable: bool,
    skips: bool,
    budget: int,
    absorb_rows: int = 1,
    spend: bool = True,
    stored_blocks: int = 0,
    look: int = 1,
    narrow: Sequence[int] = (),
) -> Buckets:
    """Chooses the buckets of an engine.

    Args:
        window: tokens of a request, prompt included.
        drafts: drafts a block, 0 for plain decoding.
        variable: cycles verify any number of drafts (adaptive modes), not all of them.
        skips: cycles without drafts occur.
        budget: programs allowed, where the configuration leaves a choice. The programs that one slot bucket
            and one context need are made in any case.
        absorb_rows: slots that catch up with skipped drafts in one program.
        spend: what is left of the budget goes into more verify sizes, evenly spread.
        stored_blocks: rows of the store of prefixes.
        look: drafts of every request that a probe verifies; some verify size of every slot bucket has room for them.
        narrow: drafts of narrower blocks, ascending. As many slot buckets as half of what is left of the budget allows
            get draft programs of them, the smallest first, where a draft is the largest part of a cycle; all of them
            where the configuration names widths.
    """
    prefill = config.prefill_buckets or _default_prefill(window)
    cells = _cells(prefill, window, drafts + 1)
    # On CPU a row costs 10 us a cell (SmolLM2-135M, measured): 512 cells for 128 are 4 ms of a step of 35.
    contexts = _contexts(config.context_buckets or ((512,) if window >= 1024 else ()), cells)
    single = (256,) if window >= 512 and config.context_buckets is None else ()
    slots = _slots(config)

    draft_contexts: tuple[int, ...] = ()

    def build(slots: tuple[int, ...], contexts: tuple[int, ...], wanted: int) -> Buckets:
        tokens = {
            s: _tokens(config, s, previous, drafts, variable, skips, wanted, look) for previous, s in _pairs(slots)
        }
        return Buckets(
            slots, contexts, single, prefill, tokens, drafts, skips, absorb_rows, draft_contexts, stored_blocks
        )

    def size(buckets: Buckets) -> int:
        return len(buckets.keys(window - 1))

    # Verify sizes a slot bucket needs, or a mode that chooses lengths has nothing to choose: none, one or many.
    least = 2 if variable and not skips else 1
    found = build(slots, contexts, least)
    if size(found) > budget and skips:
        # A draft reads few layers, so a long context costs it little; no program for it is one for many requests.
        single, draft_contexts = (), contexts[-1:]
        found = build(slots, contexts, least)
    while size(found) > budget and config.slot_buckets is None and len(slots) > 2:
        slots = _thinned(slots)
        found = build(slots, contexts, least)
    if size(found) > budget:
        single = ()
        found = build(slots, contexts, least)
    while size(found) > budget and config.context_buckets is None and len(contexts) > 1:
        contexts = contexts[1:]
        draft_contexts = draft_contexts and contexts[-1:]
        found = build(slots, contexts, least)
    if narrow:
        found = _with_narrow(found, tuple(narrow), None if config.draft_widths is not None else budget, window)
    for wanted in range(least + 1, 9) if spend else ():
        finer = dataclasses.replace(build(slots, contexts, wanted), narrow=found.narrow)
        if size(finer) > budget:
            return _partly_finer(found, finer, budget, window)
        found = finer
    return found


def _with_narrow(found: Buckets, widths: tuple[int, ...], budget: int | None, window: int) -> Buckets:
    """Narrower blocks as well: in all slot buckets, or (``budget``) in the smallest ones that half of what is left
    allows, so that verify sizes get the other half."""
    most = None if budget is None else len(found.keys(window - 1)) + (budget - len(found.keys(window - 1))) // 2
    for slots in found.slots:
        trial = dataclasses.replace(found, narrow={**found.narrow, slots: widths})
        if most is not None and len(trial.keys(window - 1)) > most:
            break
        found = trial
    return found


def _partly_finer(found: Buckets, finer: Buckets, budget: int, window: int) -> Buckets:
    """The finer verify sizes for as many slot buckets as the budget allows, the largest first; where lengths are
    chosen the smallest first: there drafts pay most."""
    for slots in found.slots if found.skips else reversed(found.slots):
        trial = dataclasses.replace(found, tokens={**found.tokens, slots: finer.tokens[slots]})
        if len(trial.keys(window - 1)) > budget:
            break
        found = trial
    return found


def _default_prefill(window: int) -> tuple[int, ...]:
    sizes = tuple(size for size in (64, 256) if size < window)
    return sizes or (max(window - 1, 1),)


def _cells(prefill: tuple[int, ...], window: int, width: int) -> int:
    """Cells that every write fits into: a block behind the last token, and the padding of a prompt's last piece,
    wherever that begins (a dynamic update that does not fit would clamp and overwrite valid cells)."""
    cells = max(window + width, window - 2 + prefill[0])
    return -(-cells // CELL_MULTIPLE) * CELL_MULTIPLE


def _contexts(wanted: tuple[int, ...], cells: int) -> tuple[int, ...]:
    return (*(c for c in wanted if c < cells), cells)


def _slots(config: EngineConfig) -> tuple[int, ...]:
    most = config.max_num_seqs
    sizes = config.slot_buckets or tuple(1 << i for i in range(most.bit_length()))
    return (*(s for s in sizes if s < most), most)


def _pairs(slots: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *slots[:-1]), slots, strict=True))


def _thinned(slots: tuple[int, ...]) -> tuple[int, ...]:
    """Without the inner bucket whose neighbours are closest, the first among equals."""
    inner = range(1, len(slots) - 1)
    leave = min(inner, key=lambda i: (slots[i + 1] / slots[i - 1], i))
    return slots[:leave] + slots[leave + 1 :]


def _tokens(
    config: EngineConfig,
    slots: int,
    previous: int,
    drafts: int,
    variable: bool,
    skips: bool,
    wanted: int,
    look: int,
) -> tuple[int, ...]:
    """Verify sizes of a slot bucket that serves more than ``previous`` requests: ``wanted`` of them at most. With the
    step without drafts beside them a single one is half a block, or what a probe needs, else the last one holds whole
    blocks."""
    if drafts == 0:
        return ()
    whole = slots * (drafts + 1)
    if config.max_num_batched_tokens is not None:  # a larger forward would never be filled
        whole = min(whole, max(config.max_num_batched_tokens, slots + skips))
    if config.token_buckets is not None:
        return (*(t for t in config.token_buckets if slots <= t < whole), whole)
    if variable:
        low = slots + 1 if skips else slots
        # Spread evenly on a logarithmic scale: the price of a step grows with the ratio.
        if skips and wanted == 1:
            return (max(round((low * whole) ** 0.5), min(slots * (1 + look), whole)),)
        sizes = [round(low * (whole / low) ** (i / wanted)) for i in range(1, wanted + 1)]
        return tuple(sorted({*sizes, whole}))
    # At fixed length a forward holds whole blocks of previous + 1 .. slots requests.
    span = slots - previous
    requests = (previous + -(-span * i // wanted) for i in range(1, wanted + 1))
    return tuple(sorted({min(count * (drafts + 1), whole) for count in requests}))
