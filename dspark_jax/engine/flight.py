"""A cycle before and after its dispatch, as the host sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.engine.slots import Tenant
from dspark_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cycle that is about to run."""

    cycle: int
    rows: tuple[Tenant | None, ...]  # of the slot bucket; None where nobody works
    drafts: int  # to admit over all rows; 0: the cycle drafts nothing
    slots: int
    context: int  # cache cells that the target's forward reads
    draft_context: int
    table: Any  # step times at these slots and this context, or None

    @property
    def working(self) -> list[Tenant]:
        """Requests this cycle works for."""
        return [tenant for tenant in self.rows if tenant is not None]


@dataclasses.dataclass(frozen=True)
class Flight:
    """A cycle, or the end of a prefill, that was dispatched and not yet read."""

    rows: tuple[Tenant | None, ...]  # owners at dispatch: slots may have changed hands since
    packed: Array  # [R, W + 6], see ``steps.pack``
    cycle: int | None = None  # None: the end of a prefill
    survival: Array | None = None  # [R, G] of a cycle that drafted
