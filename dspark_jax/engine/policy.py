"""How many drafts a cycle verifies. A policy sees survivals and step times and no tokens; the loop asks it.

What may be used when (DESIGN section 2, ideas 4 and 5): ``capacity`` is asked before the cycle's noise exists
and gets scores of cycles at least two back; ``lengths`` sees the cycle's own survivals and is causal
(Algorithm 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.drafters.base import drafts_of_block
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import Tenant
from dspark_jax.schedule.prefix import admit_early_stop, capacity
from dspark_jax.types import GREEDY_TEMPERATURE

PRIOR = 0.8
"""Conditional acceptance assumed at every position before anything was seen: optimistic, so that drafting is tried."""

PROBE_FIRST, PROBE_LAST = 8, 64
"""Skipped cycles before the first probe, and between later ones (doubling from one to the other)."""


class Policy:
    """Every draft of every request (mode ``fixed``), and the base of the others."""

    rule = "all"  # of the draft program
    variable = False  # cycles may verify fewer drafts than all
    skips = False  # cycles without drafts occur
    reads_back = False  # the draft's outcome is needed on the host before verify
    lagged = False  # decisions must see exactly what is two cycles old, also where nothing overlaps
    competes = False  # requests compete for drafts: equal seeds must be told apart

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def capacity(self, cycle: int, tenants: Sequence[Tenant], table: Any) -> int:
        """Drafts to admit over all ``tenants`` in this cycle; 0 skips the draft. ``table``: step times, or None."""
        return self.drafts * len(tenants)

    def lengths(self, admitted: np.ndarray, survival: np.ndarray, table: Any) -> np.ndarray:
        """Of a policy that ``reads_back``: drafts to verify ``[N]`` of the N working rows."""
        raise NotImplementedError

    def observe(self, cycle: int, scores: Sequence[tuple[Tenant, np.ndarray]]) -> None:
        """Survivals ``[G]`` of a settled cycle's requests."""


class Plain(Policy):
    """No drafts at all (mode ``none``)."""

    def capacity(self, cycle: int, tenants: Sequence[Tenant], table: Any) -> int:
        return 0


class Threshold(Policy):
    """Up to the first position below the confidence threshold; the draft program finds the lengths."""

    rule, variable, reads_back = "threshold", True, True

    def lengths(self, admitted: np.ndarray, survival: np.ndarray, table: Any) -> np.ndarray:
        return admitted


class EarlyStop(Policy):
    """Algorithm 1 of the paper on the cycle's own survivals: causal, so it may look at them."""

    variable, reads_back, competes = True, True, True

    def lengths(self, admitted: np.ndarray, survival: np.ndarray, table: Any) -> np.ndarray:
        return admit_early_stop(survival, table, table.draft_ms or 0.0)


class Lagged(Policy):
    """The paper's capacity search on scores two cycles old; the device admits that many by current survival."""

    rule, variable, skips, lagged, competes = "top_k", True, True, True, True

    def __init__(self, drafts: int) -> None:
        super().__init__(drafts)
        self._prior = PRIOR ** np.arange(1, drafts + 1)
        self._unread: deque[tuple[int, np.ndarray]] = deque()
        self._skipped, self._wait = 0, PROBE_FIRST

    def capacity(self, cycle: int, tenants: Sequence[Tenant], table: Any) -> int:
        while self._unread and self._unread[0][0] <= cycle - 2:
            self._prior = 0.9 * self._prior + 0.1 * self._unread.popleft()[1]
        rows = np.stack([self._estimate(tenant, cycle) for tenant in tenants])
        admitted = capacity(rows, table, table.draft_ms or 0.0)
        if admitted:
            self._skipped, self._wait = 0, PROBE_FIRST
            return admitted
        # Cycles without drafts leave no scores: look again now and then, or drafting would never resume.
        self._skipped += 1
        if self._skipped < self._wait:
            return 0
        self._skipped, self._wait = 0, min(2 * self._wait, PROBE_LAST)
        return len(tenants)

    def _estimate(self, tenant: Tenant, cycle: int) -> np.ndarray:
        """``[G]``: the request's newest score that is two cycles old; a new tenant starts from the prior, never
        from what its slot last saw."""
        for at, row in reversed(tenant.scores):
            if at <= cycle - 2:
                return row
        return self._prior

    def observe(self, cycle: int, scores: Sequence[tuple[Tenant, np.ndarray]]) -> None:
        for tenant, row in scores:
            tenant.scores = [*tenant.scores[-1:], (cycle, row)]
        if scores:
            mean = np.mean([row for _, row in scores], axis=0, dtype=np.float64)
            self._unread.append((cycle, np.asarray(mean)))


class Temperatures:
    """The confidence temperatures of a request, from the calibration table of its rule (DESIGN section 5).

    Args:
        calibration: a Calibration, CalibrationTables or None (raw confidences).
        drafts: drafts a block.

    Raises:
        ValueError: a table knows fewer positions.
    """

    def __init__(self, calibration: Any, drafts: int) -> None:
        self._calibration, self._drafts = calibration, drafts
        for table in getattr(calibration, "tables", (calibration,)):
            known = drafts if table is None else table.temperature.shape[-1]
            if known < drafts:
                raise ValueError(f"calibration: {known} temperatures for blocks of {drafts} drafts")

    def of(self, request: Checked) -> np.ndarray | float:
        """``[G]``, or 1 where there is no table for the request."""
        table = self._calibration
        if hasattr(table, "pick"):
            greedy = request.sampling.temperature < GREEDY_TEMPERATURE
            table = table.pick("coupled" if request.coupled else "rejection", 0.0 if greedy else 1.0)
        return 1.0 if table is None else np.asarray(table.temperature, np.float32)[: self._drafts]


def choose_policy(config: EngineConfig, drafter: Any) -> tuple[str, Policy, list[str]]:
    """The mode that can run, its policy, and a line for everything that is not as asked.

    Raises:
        ValueError: the mode needs what the drafter does not have, or ``num_speculative_tokens`` does not fit
            it.
    """
    notes: list[str] = []
    asked = mode = config.mode
    if drafter is None:
        if asked != "none":
            notes.append(f"mode {asked} runs as none: there is no drafter")
        return "none", Plain(0), notes
    if mode == "none":
        return "none", Plain(0), notes
    drafts = drafts_of_block(drafter, config.num_speculative_tokens)
    if mode == "current":
        mode = "lagged"
        notes.append("mode current is not in this version: lagged")
    if mode == "threshold":
        if not drafter.has_confidence:
            raise ValueError("mode 'threshold' needs a drafter with a confidence head")
    elif mode in ("lagged", "early_stop"):
        lack = _lacking(config, drafter)
        if lack:
            notes.append(f"WARNING mode {mode} runs as fixed: {lack}")
            mode = "fixed"
    policies: dict[str, type[Policy]] = {
        "fixed": Policy,
        "threshold": Threshold,
        "early_stop": EarlyStop,
        "lagged": Lagged,
    }
    policy = policies[mode](drafts)
    if policy.reads_back and config.overlap:
        notes.append(f"mode {mode} reads scores back before it verifies: cycles do not overlap")
    return mode, policy, notes


def _lacking(config: EngineConfig, drafter: Any) -> str | None:
    if not drafter.has_confidence:
        return "the drafter has no confidence head"
    if config.step_time is None:
        return "there is no step-time table (step_time)"
    return None
