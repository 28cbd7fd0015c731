"""The ways of serving that are compared, for a real engine and for the simulated one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of serving.

    Attributes:
        name: shown. mode: of ``EngineConfig``. drafts: a block; None: the drafter's own number.
        threshold: of mode ``threshold``.
        drafter: which traces and draft times a simulation takes (``dspark``, ``mtp``).
    """

    name: str
    mode: str
    drafts: int | None = None
    threshold: float = 0.0
    drafter: str = "dspark"

    @property
    def fixed(self) -> bool:
        """Every cycle verifies equally many drafts a request: none counts as one of them."""
        return self.mode in ("none", "fixed")


NONE = Arm("none", "none")
ADAPTIVE = Arm("adaptive", "lagged")


def load_arms(fixed: Sequence[int], threshold: float) -> tuple[Arm, ...]:
    """No speculation, each fixed number of drafts, a static threshold, the adaptive scheduler."""
    middle = tuple(Arm(f"fixed {k}", "fixed", k) for k in fixed)
    return (NONE, *middle, Arm("threshold", "threshold", threshold=threshold), ADAPTIVE)


def simulated_arms(fixed: Sequence[int], threshold: float) -> tuple[Arm, ...]:
    """``load_arms`` and MTP-1, the paper's own baseline: one draft by a drafter of one layer."""
    none, *others = load_arms(fixed, threshold)
    return (none, Arm("MTP-1", "fixed", 1, drafter="mtp"), *others)
