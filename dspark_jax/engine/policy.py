"""How many drafts a cycle verifies. A policy sees survivals and step times and no tokens; the loop asks it.

What may be used when (DESIGN section 2, ideas 4 and 5): ``decide`` is asked before the cycle's noise exists and
knows scores of cycles at least two back. ``lengths`` may look at the cycle's own survivals only where that cannot
bias: causally (Algorithm 1), or where every request emits the target's own choices.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from dspark_jax.engine.estimates import Score
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import RAW, Correction, Tenant
from dspark_jax.schedule import StepTimeTable
from dspark_jax.types import GREEDY_TEMPERATURE

LOG = logging.getLogger("dspark_jax.engine")

OUTSIDE = -1
"""In ``Decision.least``: the request gets no draft."""

Costs: TypeAlias = Callable[..., tuple[StepTimeTable, float]]
"""Step times of a cycle, and the milliseconds of drafting for the requests that are marked (a sequence of bool), in
whole blocks; with a second argument, in blocks of so many drafts: infinite where there is no program for them."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a cycle of N requests shall do, from old scores alone.

    Attributes:
        drafts: to admit over all requests; 0: the cycle drafts nothing.
        least: ``[N]`` int32: the first so many drafts of a request are verified in any case (a probe), ``OUTSIDE``
            where it gets none.
        probe: a skipping engine looks again.
        fallback: ``current`` may not look at the cycle's own scores, and does as ``lagged``.
        table, draft_ms: step times it was made with; None and 0 without.
        other_ms: of pieces of prompts in the same step.
        most: ``[N]`` int32: drafts verified of each request at most; None: whole blocks.
        width: drafts of each block that is made; None: whole blocks.
    """

    drafts: int
    least: np.ndarray
    probe: bool = False
    fallback: bool = False
    table: StepTimeTable | None = None
    draft_ms: float = 0.0
    other_ms: float = 0.0
    most: np.ndarray | None = None
    width: int | None = None


@dataclasses.dataclass(frozen=True)
class Beside:
    """What pieces of prompts do to the step that a cycle runs in; their sizes are known before it begins.

    Attributes:
        crowded: they have taken tokens of it, so that what it leaves to drafts says nothing about their worth.
        other_ms: what they take.
        room: tokens that are left of the step for the requests and their drafts, None: any number; where there are step
            times, they end there.
    """

    crowded: bool = False
    other_ms: float = 0.0
    room: int | None = None


ALONE = Beside()


def even_shares(drafts: int, requests: int, most: int) -> np.ndarray:
    """``[requests]`` int32: ``drafts`` in all, at most ``most`` each; those that are left over go to the first ones. It
    counts requests and looks at no score, so that it cannot bias."""
    each, left = divmod(max(drafts, 0), requests)
    return np.minimum(each + (np.arange(requests) < left), most).astype(np.int32)


class Policy:
    """Every draft of every request (mode ``fixed``), and the base of the others."""

    rule = "all"  # of the draft program
    variable = False  # cycles may verify fewer drafts than all
    skips = False  # cycles without drafts occur
    reads_back = False  # the draft's outcome is needed on the host before verify
    lagged = False  # decisions must see exactly what is two cycles old, also where nothing overlaps
    competes = False  # requests compete for drafts: equal seeds must be told apart
    timed = False  # decides by step times
    look = 1  # drafts of a request that a probe verifies
    narrow: tuple[int, ...] = ()  # drafts of the blocks that it may ask for beside whole ones, ascending

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def decide(self, cycle: int, tenants: Sequence[Tenant], costs: Costs | None, beside: Beside = ALONE) -> Decision:
        """For the cycle that is about to run. ``costs``: None where there are no step times."""
        requests = len(tenants)
        free = self.drafts * requests if beside.room is None else beside.room - requests
        most = even_shares(free, requests, self.drafts)
        return Decision(int(most.sum()), np.zeros(requests, np.int32), most=most)

    def conditional(self, tenant: Tenant) -> np.ndarray | None:
        """``[G]`` acceptance of a request's drafts by position, for drafters that do not say; None: they do."""
        return None

    def lengths(
        self, tenants: Sequence[Tenant], decision: Decision, admitted: np.ndarray, survival: np.ndarray
    ) -> np.ndarray:
        """Of a policy that ``reads_back``: drafts to verify ``[N]``, from what the draft program admitted and the
        survivals ``[N, G]`` of the blocks at hand."""
        raise NotImplementedError

    def observe(self, cycle: int, scores: Sequence[Score]) -> None:
        """What a settled cycle that drafted says about its requests."""

    def forget(self) -> None:
        """All requests are gone, and cycles begin at 0 again."""


class Plain(Policy):
    """No drafts at all (mode ``none``)."""

    def decide(self, cycle: int, tenants: Sequence[Tenant], costs: Costs | None, beside: Beside = ALONE) -> Decision:
        return Decision(0, np.full(len(tenants), OUTSIDE, np.int32))


class Threshold(Policy):
    """Up to the first position below the confidence threshold; the draft program finds the lengths."""

    rule, variable, reads_back = "threshold", True, True

    def lengths(
        self, tenants: Sequence[Tenant], decision: Decision, admitted: np.ndarray, survival: np.ndarray
    ) -> np.ndarray:
        return admitted


class Corrections:
    """What corrects the confidences of a request: the calibration table of its rule (DESIGN section 5).

    Args:
        calibration: a Calibration, CalibrationTables or None (raw confidences).
        drafts: drafts a block.

    Raises:
        ValueError: a table knows fewer positions.
    """

    def __init__(self, calibration: Any, drafts: int) -> None:
        self._calibration, self._drafts = calibration, drafts
        self._missed: set[str] = set()
        for table in getattr(calibration, "tables", (calibration,)):
            known = drafts if table is None else table.temperature.shape[-1]
            if known < drafts:
                raise ValueError(f"calibration: {known} temperatures for blocks of {drafts} drafts")

    def of(self, request: Checked) -> Correction:
        """``RAW`` where there is no table for the request, which is logged once."""
        table = self._calibration
        if hasattr(table, "pick"):
            greedy = request.sampling.temperature < GREEDY_TEMPERATURE
            rule, temperature = "coupled" if request.coupled else "rejection", 0.0 if greedy else 1.0
            table = table.pick(rule, temperature)
            missed = f"{rule} at temperature {temperature:g}"
            if table is None and missed not in self._missed:
                self._missed.add(missed)
                LOG.warning("no calibration table for %s: raw confidences are used", missed)
        if table is None:
            return RAW
        return Correction(np.asarray(table.temperature, np.float32)[: self._drafts], float(table.shift or 0.0))
