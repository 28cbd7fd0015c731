"""What the engine tells of its cycles: a report each to whoever watches, and numbers that grow."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from dspark_jax.engine.counters import Counters
from dspark_jax.engine.drift import Drift
from dspark_jax.engine.estimates import Score
from dspark_jax.engine.flight import Flight
from dspark_jax.engine.policy import OUTSIDE
from dspark_jax.engine.slots import Tenant
from dspark_jax.engine.steps import Emitted


@dataclasses.dataclass(frozen=True)
class CycleReport:
    """One settled cycle of N requests.

    Attributes:
        cycle: its number. program: of the target's forward; ``slots``, ``tokens`` and ``context`` are its sizes.
        requests: ``[N]`` ids. committed, offered, accepted: ``[N]`` as in ``Result``, before a stop or a limit is cut.
        drafted: ``[N]`` drafts made for each, which may be fewer than G; zeros stand behind them in the next two.
            survival: ``[N, G]`` of their blocks, None where nothing was drafted
            and in mode ``fixed``, which does not ask.
        drafts: ``[N, G]`` their tokens, None where survival is.
        scheduled: drafts admitted over all requests. probe, fallback: see ``policy.Decision``.
        predicted_ms: by the step-time table, None without one.
        measured_ms: None where other programs (prompts, moves, copies, the absorption of held tokens) ran in between.
        decoding_ms: the same, of cycles that absorbed held tokens too, which is part of what decoding takes.
    """

    cycle: int
    program: str
    slots: int
    tokens: int
    context: int
    requests: tuple[int, ...]
    committed: np.ndarray
    offered: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    survival: np.ndarray | None
    scheduled: int
    probe: bool
    fallback: bool
    predicted_ms: float | None
    measured_ms: float | None
    drafts: np.ndarray | None = None
    decoding_ms: float | None = None


Watcher = Callable[[CycleReport], None]


class Reports:
    """Turns settled flights into counters, scores and reports."""

    def __init__(self, counters: Counters, drafts: int, drift: Drift | None = None) -> None:
        self.watchers: list[Watcher] = []
        self._counters, self._drafts, self._drift = counters, drafts, drift
        self._settled = 0.0  # when the cycle before was known to be over

    def settled(self, flight: Flight, out: Emitted) -> list[Score]:
        """Books a cycle that has just been read. Returns what it says to the policy, of requests still at work."""
        now = time.perf_counter() if flight.over is None else flight.over
        decoding_ms = 1e3 * (now - max(flight.began, self._settled)) if flight.decodes else None
        measured_ms = decoding_ms if flight.alone else None
        self._settled = now
        plan, key = flight.plan, flight.key
        if plan is None or key is None:
            return []
        # A copy: scores are remembered, and a view would keep the device's array as long.
        survival = None if flight.survival is None else np.array(flight.survival)
        rows = [row for row in plan.places if out.count[row]]
        drafted = survival is not None or key.kind == "verify"  # scores are read only where the mode asks for them
        inside = (plan.least != OUTSIDE) if drafted else np.zeros(plan.slots, bool)
        predicted_ms = predicted(flight)
        self._count(flight, out, rows, inside, predicted_ms, measured_ms)
        if self._drift is not None and predicted_ms is not None and measured_ms is not None:
            if flight.survival is None or key.kind == "verify":  # else a draft that was paid and not verified
                self._drift.observe(plan.cycle, key, predicted_ms, measured_ms)
        if self.watchers:
            report = CycleReport(
                cycle=plan.cycle,
                program=str(key),
                slots=key.slots,
                tokens=key.tokens,
                context=key.context,
                requests=tuple(plan.rows[row].id for row in rows),  # type: ignore[union-attr]
                committed=out.count[rows],
                offered=out.offered[rows],
                accepted=out.accepted[rows],
                drafted=plan.width(self._drafts) * inside[rows],
                survival=None if survival is None else survival[rows],
                scheduled=flight.scheduled,
                probe=plan.decision.probe,
                fallback=plan.decision.fallback,
                predicted_ms=predicted_ms,
                measured_ms=measured_ms,
                drafts=None if flight.tokens is None else np.asarray(flight.tokens)[rows],
                decoding_ms=decoding_ms,
            )
            for watcher in self.watchers:
                watcher(report)
        if survival is None:
            return []
        scored, width = [row for row in rows if inside[row]], plan.width(self._drafts)
        return [
            Score(tenant, survival[row], int(out.offered[row]), int(out.accepted[row]), tenant.stays, width)
            for row in scored
            if (tenant := plan.rows[row]) is not None
        ]

    def _count(
        self,
        flight: Flight,
        out: Emitted,
        rows: Sequence[int],
        inside: np.ndarray,
        predicted_ms: float | None,
        measured_ms: float | None,
    ) -> None:
        width = self._drafts if flight.plan is None else flight.plan.width(self._drafts)
        for row in rows:
            self._counters.budgets[str(int(out.offered[row]))] += 1
            if inside[row]:
                self._counters.add("trimmed", width - int(out.offered[row]))
        if predicted_ms is not None and measured_ms is not None:
            self._counters.add("predicted_milliseconds", predicted_ms)
            self._counters.add("measured_milliseconds", measured_ms)

    def regret(self, tenant: Tenant, flight: Flight, out: Emitted, row: int) -> None:
        """Counts trimmed drafts that the text then repeats, as far as it does without a gap. Called with the cycle's
        tokens already added to the tenant's."""
        accepted, offered = int(out.accepted[row]), int(out.offered[row])
        if flight.tokens is not None and accepted == offered and flight.plan is not None:
            tail = np.asarray(flight.tokens)[row, offered : flight.plan.width(self._drafts)].tolist()
            if tail and flight.plan.least[row] != OUTSIDE:
                own = len(tenant.tokens) - int(out.count[row]) + accepted
                tenant.trimmed.append((own, tail))
        waiting, tenant.trimmed = tenant.trimmed, []
        for place, tail in waiting:
            known = tenant.tokens[place : place + len(tail)]
            equal = next((i for i, pair in enumerate(zip(known, tail, strict=False)) if pair[0] != pair[1]), len(known))
            self._counters.add("regretted", equal)
            if equal == len(known) < len(tail):
                tenant.trimmed.append((place + equal, tail[equal:]))


def predicted(flight: Flight) -> float | None:
    """Milliseconds of the cycle by the table it was decided with; None without one."""
    plan = flight.plan
    if plan is None or plan.decision.table is None:
        return None
    tokens = len(plan.working) + flight.scheduled
    table, drafted = plan.decision.table, flight.survival is not None
    return table.ms(min(tokens, table.last)) + (plan.decision.draft_ms if drafted else 0.0)
