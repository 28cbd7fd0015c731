"""Who sits where: tenants (requests at work), the slots they occupy, and the seeds they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dspark_jax.engine.request import Checked, Result
from dspark_jax.types import GREEDY_TEMPERATURE

_GOLDEN = 0x9E3779B1
_WORD = 0xFFFFFFFF


@dataclasses.dataclass(eq=False)
class Tenant:
    """A request from its submission to its end, as the host knows it: up to the last settled cycle."""

    id: int
    request: Checked
    seed: int  # what keys its numbers; ``claim_seed`` may change it at admission
    slot: int | None = None
    prefilled: int = 0  # prompt tokens handed to the device
    decoding: bool = False  # the whole prompt has been handed over
    promised: int = 0  # dispatched and not settled, each at least one token: the prefill's end and cycles
    finish_reason: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)
    offered: list[int] = dataclasses.field(default_factory=list)
    confidence_temperature: np.ndarray | float = 1.0  # [G] of its calibration
    held: int = 0  # tokens that the drafter has not absorbed
    # What the policy remembers of it; see ``estimates.py`` and ``adaptive.py``.
    score: tuple[int, np.ndarray] | None = None  # (cycle, survival [G]) of its newest block
    acceptances: np.ndarray | None = None  # [2, G] drafts accepted and tried
    low: int = 0  # cycles in a row in which its first draft was not worth its place
    trimmed: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)  # (place in tokens, drafts)
    left: Any = None  # the ``Probe`` of a request that has left the draft batch

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
        known = len(self.request.prompt) + max(len(self.tokens) - 1, 0)
        last = len(self.request.prompt) + self.request.limit - 1
        return min(known + self.promised * width, last)

    def result(self) -> Result:
        """What it has made; for a tenant that has ended."""
        return Result(list(self.tokens), list(self.committed), list(self.offered), str(self.finish_reason))


class Slots:
    """Tenants by slot. The device holds a slot's arrays and cache; this is the host's list of who owns it."""

    def __init__(self, count: int) -> None:
        self._tenants: list[Tenant | None] = [None] * count

    def __iter__(self) -> Iterator[Tenant]:
        """Occupied slots, lowest first."""
        return (t for t in self._tenants if t is not None)

    def __len__(self) -> int:
        return sum(t is not None for t in self._tenants)

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


def _mix(h: int) -> int:
    """``noise.mix`` on the host."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & _WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _WORD
    return h ^ (h >> 16)


def claim_seed(seed: int, taken: Collection[int]) -> int:
    """``seed``, or hash(seed, k) with the smallest k >= 1 that is not taken: ``noise.distinct_seeds`` for requests
    that come one by one. Two ``rejection`` requests that compete for admission must not share their numbers
    (DESIGN section 2, idea 4)."""
    own, k = seed, 0
    while own in taken:
        k += 1
        own = _mix(_mix(seed ^ 0x452821E6) + k * _GOLDEN & _WORD)
    return own
