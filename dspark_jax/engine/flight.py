"""A cycle before and after its dispatch, as the host sees it."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np

from dspark_jax.engine.buckets import Key
from dspark_jax.engine.policy import OUTSIDE, Decision
from dspark_jax.engine.slots import Tenant
from dspark_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cycle that is about to run. What follows from its fields is asked for many times, and computed once: nobody may
    change it."""

    cycle: int
    rows: tuple[Tenant | None, ...]  # of the slot bucket; None where nobody works
    decision: Decision  # its entries are those of ``working``
    slots: int
    context: int  # cache cells that the target's forward reads
    draft_context: int

    @cached_property
    def working(self) -> list[Tenant]:
        """Requests this cycle works for."""
        return [tenant for tenant in self.rows if tenant is not None]

    @cached_property
    def places(self) -> list[int]:
        """Their rows."""
        return [row for row, tenant in enumerate(self.rows) if tenant is not None]

    def draft_slots(self, size: int) -> np.ndarray:
        """``[size]`` int32, ascending: the slots a draft program of ``size`` rows works for. All that get a draft, and
        as many others as fill it up."""
        least = self.least
        first = np.argsort(least == OUTSIDE, kind="stable")[:size]
        return np.sort(first).astype(np.int32)

    @cached_property
    def least(self) -> np.ndarray:
        """``[R]`` the decision's ``least`` by row; idle rows get no drafts."""
        least = np.full(self.slots, OUTSIDE, np.int32)
        least[self.places] = self.decision.least
        least.setflags(write=False)
        return least

    def width(self, drafts: int) -> int:
        """Drafts of each block that is made, of ``drafts`` at most."""
        return self.decision.width or drafts

    def most(self, drafts: int) -> np.ndarray:
        """``[R]`` int32 the decision's ``most`` by row, of blocks of ``drafts``."""
        most = np.full(self.slots, drafts, np.int32)
        if self.decision.most is not None:
            most[self.places] = self.decision.most
        return most


@dataclasses.dataclass(frozen=True)
class Flight:
    """A cycle, or the end of a prefill, that was dispatched and not yet read."""

    rows: tuple[Tenant | None, ...]  # owners at dispatch: slots may have changed hands since
    packed: Array  # [R, W + 6], see ``steps.pack``
    plan: Plan | None = None  # None: the end of a prefill
    key: Key | None = None  # program of the target's forward
    scheduled: int = 0  # drafts admitted over all rows
    survival: Array | None = None  # [S, G] of a cycle that drafted
    tokens: Array | None = None  # [S, G] its drafts
    began: float = 0.0  # seconds, at the first dispatch of the cycle
    over: float | None = None  # seconds, by when it was known to have ended; None: by when it is read
    alone: bool = True  # nothing but the cycle's own programs ran since the cycle before
    decodes: bool = True  # nothing but these and the absorption of held tokens did

    def arrays(self) -> list[Any]:
        """What the host will read."""
        return [a for a in (self.packed, self.survival, self.tokens) if a is not None]
