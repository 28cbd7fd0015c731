"""The policies that decide by step times: lagged, early stop, current.

All begin with the same decision from old scores: whether to draft at all, and for whom. ``lagged`` takes the number
of drafts from it as well; the other two look at the scores of the block at hand, each where it cannot bias.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.estimates import Acceptances, Confidences, Probe, Score
from dspark_jax.engine.policy import ALONE, OUTSIDE, Beside, Costs, Decision, Policy
from dspark_jax.engine.slots import Tenant
from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.choice import Choice, choose
from dspark_jax.schedule.prefix import admit_early_stop, admit_top_k

LOW_CYCLES = 8
"""So many cycles in a row a request's first draft must not be worth its place before it leaves the draft batch."""


class Lagged(Policy):
    """The paper's capacity search on scores two cycles old; the device admits that many by current survival."""

    rule, variable, skips, lagged, competes, timed = "top_k", True, True, True, True, True

    def __init__(
        self,
        drafts: int,
        config: EngineConfig | None = None,
        *,
        has_confidence: bool = True,
        narrow: Sequence[int] = (),
    ) -> None:
        super().__init__(drafts)
        self.narrow = tuple(narrow)
        config = EngineConfig() if config is None else config
        self._min_gain, self._floor_per_ms = config.min_gain, config.speed_floor / 1e3
        self._estimates = (Confidences if has_confidence else Acceptances)(drafts)
        # A confidence head scores a whole block of which one draft is verified; without one only what is verified is
        # learned from.
        self.look = 1 if has_confidence else drafts
        self._probe = Probe()
        self._whole = Probe()  # when to draft a whole block where narrower ones are chosen
        self._looks = 0  # how often that was

    def observe(self, cycle: int, scores: Sequence[Score]) -> None:
        self._estimates.observe(cycle, scores)

    def forget(self) -> None:
        self._estimates.forget()

    def conditional(self, tenant: Tenant) -> np.ndarray | None:
        return self._estimates.conditional(tenant)

    def decide(self, cycle: int, tenants: Sequence[Tenant], costs: Costs | None, beside: Beside = ALONE) -> Decision:
        if costs is None:
            raise RuntimeError("an adaptive policy was asked before there are step times")
        self._estimates.advance(cycle)
        rows = self._estimates.survivals(tenants, cycle)
        # One that has left counts again in the cycle that may know what its probe brought.
        counts = [t.left is None or self._estimates.fresh(t, cycle) for t in tenants]
        table, draft_ms = costs(counts)
        expected = self._estimates.expected(rows)
        if not all(counts):
            expected = np.where(np.array(counts)[:, None], expected, 0.0)
        width, choice = self._search(expected, table, draft_ms, counts, costs, beside.other_ms)
        if not beside.crowded:
            self._judge(tenants, counts, rows[:, 0], choice)
        if choice.drafts:
            return self._drafting(tenants, choice.drafts, costs, width)
        # Where the step has no place for a draft a probe would see nothing, and is kept for one that has.
        if beside.crowded or table.last <= len(tenants) or not self._probe.due():
            return Decision(0, np.full(len(tenants), OUTSIDE, np.int32), table=table, draft_ms=draft_ms)
        table, draft_ms = costs([True] * len(tenants))
        # What the largest program can verify: at least one draft of each, more of each where there is room.
        look = max(min(self.look, table.last // len(tenants) - 1), 1)
        least = np.full(len(tenants), look, np.int32)
        total = self._filled(look * len(tenants), len(tenants), len(tenants), table, self.drafts)
        return Decision(total, least, probe=True, table=table, draft_ms=draft_ms)

    def _search(
        self,
        rows: np.ndarray,
        table: StepTimeTable,
        draft_ms: float,
        counts: Sequence[bool],
        costs: Costs,
        other_ms: float,
    ) -> tuple[int, Choice]:
        """The width of the blocks to draft and the capacity, the best of all widths' own; the narrower among equals.
        Both are known before the blocks' noise, from the same old scores."""
        best = self.drafts, self._choose(rows, table, draft_ms, other_ms)
        for width in reversed(self.narrow):
            narrow_table, narrow_ms = costs(counts, width)
            if math.isfinite(narrow_ms):
                choice = self._choose(rows[:, :width], narrow_table, narrow_ms, other_ms)
                if choice.worth >= best[1].worth:
                    best = width, choice
        return best

    def _looked_behind(self, width: int) -> int:
        """``width``, and now and then whole blocks: scores of narrow ones say nothing of the places behind them."""
        if width == self.drafts:
            self._whole = Probe()
            return width
        return self.drafts if self._whole.due() else width

    def _verified_behind(self, least: np.ndarray) -> None:
        """Without a confidence head a whole block shows nothing but what is verified of it: in its turn, which no score
        decides, all of one request's."""
        if self.look > 1:
            inside = np.flatnonzero(least != OUTSIDE)
            least[inside[self._looks % inside.size]] = self.look
            self._looks += 1

    def _choose(
        self, rows: np.ndarray, table: StepTimeTable, draft_ms: float, other_ms: float, paid: bool = False
    ) -> Choice:
        return choose(
            rows,
            table,
            draft_ms,
            draft_paid=paid,
            min_gain=self._min_gain,
            floor_per_ms=self._floor_per_ms,
            other_ms=other_ms,
        )

    def _judge(self, tenants: Sequence[Tenant], counts: Sequence[bool], first: np.ndarray, choice: Choice) -> None:
        """Who leaves the draft batch, and who comes back: by its own first survival as it was scored. What is expected
        of the next block is nearer to the average of all, but eight scores in a row speak for themselves."""
        for tenant, counted, survival in zip(tenants, counts, first, strict=True):
            if not counted:
                continue
            low = survival < choice.edge
            if tenant.left is None:
                tenant.low = tenant.low + 1 if low else 0
                if tenant.low >= LOW_CYCLES:
                    tenant.left = Probe()
            elif not low:
                tenant.left, tenant.low = None, 0

    def _drafting(self, tenants: Sequence[Tenant], drafts: int, costs: Costs, width: int) -> Decision:
        """A cycle that drafts blocks of ``width`` (or looks behind them): for all who have not left, and those who are
        due to be looked at."""
        self._probe = Probe()
        chosen, width = width, self._looked_behind(width)
        least = np.zeros(len(tenants), np.int32)
        for i, tenant in enumerate(tenants):
            if tenant.left is not None:
                least[i] = self.look if tenant.left.due() else OUTSIDE
        if (least == OUTSIDE).all():  # those whom the search counted have just left
            return Decision(0, least)
        if width != chosen:
            self._verified_behind(least)
        marked = (least != OUTSIDE).tolist()
        table, draft_ms = costs(marked) if width == self.drafts else costs(marked, width)
        if math.isinf(draft_ms):  # another number of requests, for which there is no such program
            width, (table, draft_ms) = self.drafts, costs(marked)
        least = np.minimum(least, width).astype(np.int32)
        wanted, drafting = drafts + int(np.maximum(least, 0).sum()), int((least != OUTSIDE).sum())
        total = self._filled(wanted, len(tenants), drafting, table, width)
        narrow = None if width == self.drafts else width
        return Decision(total, least, table=table, draft_ms=draft_ms, width=narrow)

    def _filled(self, drafts: int, requests: int, drafting: int, table: StepTimeTable, width: int) -> int:
        """So many drafts, fewer where the table ends (that of the programs, or a caller's wish), and more where the
        step that they need has places left: those are paid for, and the likeliest of the others take them."""
        most = min(width * drafting, table.last - requests)
        return min(table.bucket(requests + min(drafts, most)) - requests, most)


class EarlyStop(Lagged):
    """Algorithm 1 of the paper on the cycle's own survivals: causal, so it may look at them."""

    lagged, reads_back = False, True

    def lengths(
        self, tenants: Sequence[Tenant], decision: Decision, admitted: np.ndarray, survival: np.ndarray
    ) -> np.ndarray:
        table = decision.table
        if table is None:
            raise RuntimeError("Algorithm 1 needs step times")
        found = admit_early_stop(survival, table, decision.draft_ms)
        return _with_probes(found, decision, survival)


class Current(Lagged):
    """The unconstrained search on the cycle's own survivals. It looks past a draft at what follows it, which would
    bias a request that can emit its draft's token by chance: where one is at work, the cycle does as ``lagged``."""

    lagged, reads_back = False, True

    def decide(self, cycle: int, tenants: Sequence[Tenant], costs: Costs | None, beside: Beside = ALONE) -> Decision:
        decision = super().decide(cycle, tenants, costs, beside)
        fallback = decision.drafts > 0 and not all(tenant.indifferent for tenant in tenants)
        return dataclasses.replace(decision, fallback=fallback, other_ms=beside.other_ms)

    def lengths(
        self, tenants: Sequence[Tenant], decision: Decision, admitted: np.ndarray, survival: np.ndarray
    ) -> np.ndarray:
        if decision.fallback or decision.table is None:
            return admitted
        found = self._choose(survival, decision.table, decision.draft_ms, decision.other_ms, paid=True)
        return _with_probes(admit_top_k(survival, found.drafts), decision, survival)


def _with_probes(lengths: np.ndarray, decision: Decision, survival: np.ndarray) -> np.ndarray:
    """Lengths, and the first drafts of a probe whatever the scores say: that too was known before the tokens were.
    Where both do not fit into the largest program the probe is left out."""
    forced = np.minimum(np.maximum(decision.least, 0), (survival > 0).sum(axis=1))
    found = np.maximum(lengths, forced)
    fits = decision.table is None or int(found.sum()) + len(found) <= decision.table.last
    return (found if fits else lengths).astype(np.int32)
