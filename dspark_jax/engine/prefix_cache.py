"""Which blocks of text the device still holds, and where: the host's half of prefix reuse.

A text is cut into blocks of ``BLOCK`` tokens, and a block is known by its own tokens and by the block before it: what
a cache holds of a token is a function of the tokens up to it, of the weights, and of nothing else that one engine may
change. Blocks are compared, not hashed, so that two texts are never taken for one another. The values lie in a store
of ``BLOCK``-cell rows beside the slots (``copies.py``); slots stay contiguous, since a step that gathers its context
through a table of pages is slower on CPU than copying a prefix once is (benchmarks/LOG.md).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens of a block, as in vLLM: a prefix is reused in whole blocks."""


@dataclasses.dataclass(eq=False)
class Block:
    """A block of text that is in the store, or on its way there."""

    row: int  # of the store
    before: Block | None
    tokens: tuple[int, ...]
    ready: bool = False  # known to hold finite numbers
    after: dict[tuple[int, ...], Block] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Saving:
    """Blocks that are about to be copied into the store: neighbours, from block ``first`` of their text on."""

    first: int
    blocks: tuple[Block, ...]


class PrefixCache:
    """Blocks by the text before them, least recently used first out.

    Args:
        rows: of the store. 0: nothing is ever found or kept.
    """

    def __init__(self, rows: int) -> None:
        self._first: dict[tuple[int, ...], Block] = {}
        self._free = list(range(rows))[::-1]
        # Oldest use first. A block is touched after those behind it, so the oldest one has none behind it.
        self._used: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._used)

    def match(self, text: Sequence[int], most: int) -> list[Block]:
        """The blocks of the longest known beginning of ``text``, at most ``most`` tokens of it."""
        found = [block for block in self._walk(text, most // BLOCK) if block.ready]
        self._touch(found)
        return found

    def save(self, text: Sequence[int], count: int) -> Saving | None:
        """Gives rows to the blocks of the first ``count`` tokens of ``text`` that are not known, as far as there are
        rows; None where there is nothing to copy. ``confirm`` makes them usable."""
        known = list(self._walk(text, count // BLOCK))
        if known and not known[-1].ready:
            return None  # somebody else's copy of the same text is on its way
        self._touch(known)
        new: list[Block] = []
        before = known[-1] if known else None
        keep = set(known)
        for i in range(len(known), count // BLOCK):
            row = self._row(keep)
            if row is None:
                break
            block = Block(row, before, tuple(text[i * BLOCK : (i + 1) * BLOCK]))
            (self._first if before is None else before.after)[block.tokens] = block
            self._used[block] = None
            new.append(block)
            keep.add(block)
            before = block
        self._touch([*known, *new])
        return Saving(len(known), tuple(new)) if new else None

    def confirm(self, saving: Saving, sound: bool) -> None:
        """The copy has been made; ``sound``: of finite numbers. What is not is forgotten."""
        for block in saving.blocks:
            block.ready = sound
        if not sound:
            for block in reversed(saving.blocks):
                self._drop(block)

    def _walk(self, text: Sequence[int], blocks: int) -> Iterator[Block]:
        level = self._first
        for i in range(blocks):
            block = level.get(tuple(text[i * BLOCK : (i + 1) * BLOCK]))
            if block is None:
                return
            yield block
            level = block.after

    def _touch(self, path: Sequence[Block]) -> None:
        for block in reversed(path):
            self._used.move_to_end(block)

    def _row(self, keep: set[Block]) -> int | None:
        """A free row, made free if need be."""
        if not self._free:
            old = next((b for b in self._used if b.ready and not b.after and b not in keep), None)
            if old is None:
                return None
            self._drop(old)
        return self._free.pop()

    def _drop(self, block: Block) -> None:
        level = self._first if block.before is None else block.before.after
        del level[block.tokens]
        del self._used[block]
        self._free.append(block.row)
