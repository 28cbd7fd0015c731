"""Who sits where: tenants (requests at work), and the slots they occupy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.engine.prefix_cache import Block
from dspark_jax.engine.request import Checked, Result
from dspark_jax.types import GREEDY_TEMPERATURE


class Correction(NamedTuple):
    """What a request's calibration makes of a confidence: sigmoid((logit + shift) / temperature)."""

    temperature: np.ndarray | float  # [G]
    shift: float


RAW = Correction(1.0, 0.0)
"""Confidences as the drafter gives them."""


@dataclasses.dataclass(eq=False)
class Tenant:
    """A request from its submission to its end, as the host knows it: up to the last settled cycle."""

    id: int
    request: Checked
    seed: int  # what keys its numbers; ``Seeds.claim`` may change it at its first admission
    slot: int | None = None
    admitted: bool = False  # it has had a slot before, or has one
    prefilled: int = 0  # tokens of ``text`` handed to the device, or found there
    cached: int | None = None  # prompt tokens that were found in the prefix cache when it first got a slot
    again: list[Block] = dataclasses.field(default_factory=list)  # to be copied once more behind the next piece
    decoding: bool = False  # the whole text has been handed over
    promised: int = 0  # dispatched and not settled, each at least one token: the prefill's end and cycles
    finish_reason: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)
    offered: list[int] = dataclasses.field(default_factory=list)
    correction: Correction = RAW
    held: int = 0  # tokens that the drafter has not absorbed
    whole: int = 0  # tokens of ``text`` that target and drafter had surely cached before the newest cycle was read
    # What the policy remembers of it; see ``estimates.py`` and ``adaptive.py``.
    score: tuple[int, np.ndarray] | None = None  # (cycle, survival [G]) of its newest block
    earlier: tuple[int, np.ndarray] | None = None  # that of the block before
    acceptances: np.ndarray | None = None  # [2, G] drafts accepted and tried
    low: int = 0  # cycles in a row in which its first draft was not worth its place
    trimmed: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)  # (place in tokens, drafts)
    stays: int = 0  # how often it has lost its slot: scores of an earlier stay are not its own any more
    left: Any = None  # the ``Probe`` of a request that has left the draft batch

    @property
    def text(self) -> tuple[int, ...]:
        """What a slot caches of it: the prompt and the new tokens but for the last one, the anchor."""
        return (*self.request.prompt, *self.tokens[:-1])

    @property
    def known(self) -> int:
        """Tokens of ``text``."""
        return len(self.request.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def cycle(self) -> int:
        """Its cycle number, once everything dispatched has been read: the prefill's end and every cycle raised it."""
        return 1 + len(self.committed)

    def leave(self) -> None:
        """It has lost its slot and will be back: what it has emitted and its seed stay, and the policy will know no
        more of it than of a newcomer."""
        self.prefilled, self.decoding, self.again, self.held, self.whole = 0, False, [], 0, 0
        self.score = self.earlier = self.acceptances = self.left = None
        self.low, self.trimmed = 0, []
        self.stays += 1

    @property
    def indifferent(self) -> bool:
        """No admission can bias it: it emits the target's own choices (``coupled``, or temperature 0)."""
        return self.request.coupled or self.request.sampling.temperature < GREEDY_TEMPERATURE

    @property
    def may_emit(self) -> bool:
        """It may still be active on the device: the next cycle has to work for it."""
        return self.decoding and self.finish_reason is None and len(self.tokens) + self.promised < self.request.limit

    def length_bound(self, width: int) -> int:
        """Largest number of cached tokens it can have now, cycles in flight (of at most ``width``) included."""
        last = len(self.request.prompt) + self.request.limit - 1
        return min(self.known + self.promised * width, last)

    def result(self) -> Result:
        """What it has made; for a tenant that has ended."""
        return Result(
            list(self.tokens), list(self.committed), list(self.offered), str(self.finish_reason), self.cached or 0
        )


class Slots:
    """Tenants by slot. The device holds a slot's arrays and cache; this is the host's list of who owns it."""

    def __init__(self, count: int) -> None:
        self._tenants: list[Tenant | None] = [None] * count

    def __iter__(self) -> Iterator[Tenant]:
        """Occupied slots, lowest first."""
        return (t for t in self._tenants if t is not None)

    def __len__(self) -> int:
        return sum(t is not None for t in self._tenants)

    @property
    def vacant(self) -> bool:
        """There is a free slot."""
        return len(self) < len(self._tenants)

    def rows(self, count: int) -> tuple[Tenant | None, ...]:
        """Owners of the lowest ``count`` slots."""
        return tuple(self._tenants[:count])

    def take(self, tenant: Tenant) -> int | None:
        """Gives ``tenant`` the lowest free slot; None where all are taken."""
        for slot, owner in enumerate(self._tenants):
            if owner is None:
                self._tenants[slot], tenant.slot = tenant, slot
                return slot
        return None

    def release(self, tenant: Tenant) -> int:
        """Frees the tenant's slot and names it."""
        slot = tenant.slot
        if slot is None or self._tenants[slot] is not tenant:
            raise RuntimeError(f"request {tenant.id} holds no slot")
        self._tenants[slot], tenant.slot = None, None
        return slot

    def compaction(self, bucket: Callable[[int], int]) -> tuple[int, int] | None:
        """``(source, destination)`` of the move that lets the decoding tenants fit a smaller slot bucket, done in
        this list; None where no move helps (a hole inside the bucket costs nothing)."""
        decoding = [t for t in self if t.may_emit]
        if not decoding:
            return None
        top = decoding[-1]
        source = top.slot or 0
        holes = [slot for slot, owner in enumerate(self._tenants[:source]) if owner is None]
        if not holes or bucket(source + 1) <= bucket(len(decoding)):
            return None
        self._tenants[source], self._tenants[holes[0]], top.slot = None, top, holes[0]
        return source, holes[0]
