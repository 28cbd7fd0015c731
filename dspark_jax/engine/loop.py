"""The engine: continuous batching over slots, one decoding cycle a step.

A step is five statements: admit, choose capacity, draft, verify, settle. With ``overlap`` the device runs a
cycle while the host settles the one before it, so the host's view is one cycle old; the device's own flags
decide who still works. One thread uses an engine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.cycle import Static, TargetModel
from dspark_jax.drafters.base import DrafterModel
from dspark_jax.engine import steps
from dspark_jax.engine.buckets import Key
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.counters import Counters
from dspark_jax.engine.flight import Flight, Plan
from dspark_jax.engine.multiprocess import Link
from dspark_jax.engine.policy import OUTSIDE, Beside
from dspark_jax.engine.report import Reports, Watcher
from dspark_jax.engine.request import Event, Request, Result, check
from dspark_jax.engine.slots import Tenant
from dspark_jax.engine.tenancy import Tenancy
from dspark_jax.schedule import StepTimeTable


class Engine(Tenancy):
    """Decodes many requests at once.

    Args:
        target: a loaded target. drafter: a loaded drafter, or None for plain decoding.
        static: noise and logit rule, replaced in tests.
        link: of ``multiprocess.connect``, where the weights are spread over several processes. Process 0 alone is
            given requests and steps; every other one calls ``follow``.

    Attributes:
        mode: what really runs. notes: a line for everything that is not as asked; show them at start-up.
        window: tokens of a request, prompt included.
        overlap: as configured; may be changed while there is no work.

    An exception out of ``step`` (a lost device, too little memory) leaves the device's state undefined, since
    it is donated to every program. From then on ``step`` raises RuntimeError until ``reset`` has made it
    anew; requests at work are lost, programs stay compiled.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterModel | None = None,
        config: EngineConfig | None = None,
        *,
        static: Static | None = None,
        link: Link | None = None,
    ) -> None:
        super().__init__(target, drafter, config, static=static, link=link)
        config = self.config
        self.overlap = config.overlap
        self._fresh_seeds = np.random.default_rng(config.seed)
        self._ids = 0
        self._counters = Counters()
        self._reports = Reports(self._counters, self._policy.drafts, self._drift)
        self.reset()

    def reset(self) -> None:
        """Forgets all requests and makes the device's state anew."""
        self._state = None  # frees the old one first
        self._vacate()
        self._cycle = 0
        self._policy.forget()
        self._drift.forget()
        self._error: BaseException | None = None
        self._state = self._programs.init_state()

    # -- for callers -----------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id. Raises ValueError naming the field that is wrong."""
        checked = check(
            request,
            window=self.window,
            vocab_size=self._vocab_size,
            verification=self.config.verification,
            max_stops=self.config.max_stop_token_ids,
        )
        seed = int(self._fresh_seeds.integers(2**32)) if checked.seed is None else checked.seed
        self._ids += 1
        self._waiting.append(Tenant(self._ids, checked, seed))
        self._counters.add("requests")
        return self._ids

    def cancel(self, request_id: int) -> None:
        """Ends a request; its last event comes with the next step, which also frees its slot. Unknown ids and
        requests that have ended are left alone."""
        for tenant in [*self._waiting, *self._slots]:
            if tenant.id == request_id and tenant.finish_reason is None:
                if tenant.slot is None:
                    self._waiting.remove(tenant)
                    self._seeds.release(tenant.id)
                else:
                    self._cancelled.append(tenant)
                self._end(tenant, "cancelled")

    def preempt(self, request_id: int) -> None:
        """Takes a request off its slot at the next step; it waits at its old place in the line and goes on from where
        it was. Unknown ids, and requests that have no slot, are left alone."""
        if any(tenant.id == request_id and tenant.finish_reason is None for tenant in self._slots):
            self._asked.add(request_id)

    def follow(self) -> None:
        """Runs what process 0 decides, until it ends. For every other process of a ``link``.

        Raises:
            ConnectionError: process 0 is gone.
        """
        self._state = None  # the first thing that process 0 says is to make one
        self._programs.follow()  # type: ignore[attr-defined]

    def has_work(self) -> bool:
        """A step would do something or return an event."""
        return bool(self._waiting or len(self._slots) or self._flights or self._events)

    def step(self) -> list[Event]:
        """Runs one cycle. Returns what has happened since the last step, one event a request.

        Raises:
            RuntimeError: an earlier step failed and ``reset`` was not called.
        """
        if self._error is not None:
            raise RuntimeError("an earlier step failed; call reset() first") from self._error
        try:
            if self._policy.timed and self._times is None:  # nobody called warmup()
                self.prepare(lambda line: None)
            self._admit()
            self._began = time.perf_counter()
            plan = self._choose()
            draft = self._draft(plan)
            self._verify(plan, draft)
            self._settle(0 if plan is None else self._lag())
        except BaseException as error:
            self._error = error
            raise
        events, self._events = list(self._events.values()), {}
        return events

    def run(self) -> dict[int, Result]:
        """Steps until nothing is left to do; the results of the requests that ended meanwhile."""
        results: dict[int, Result] = {}
        while self.has_work():
            results |= {event.id: event.result for event in self.step() if event.result is not None}
        return results

    def warmup(self, progress: Callable[[str], None] | None = None) -> None:
        """Compiles every program and runs each once; a line each goes to ``progress``. A program compiled after
        this is counted (``late_compiles``) and logged. An adaptive mode without step times measures them, or takes
        those kept from an earlier start.

        Raises:
            RuntimeError: requests are at work.
        """
        self._idle("warmup()")
        self._prepare(progress)

    def measure_step_times(self, progress: Callable[[str], None] | None = None) -> StepTimeTable:
        """``warmup``, with step times measured anew and kept for the next start, whatever there was.

        Raises:
            ValueError: the mode does not decide by step times.
            RuntimeError: requests are at work.
        """
        self._idle("measure_step_times()")
        if not self._policy.timed:
            raise ValueError(f"mode {self.mode} does not decide by step times")
        self._prepare(progress, anew=True)
        return self._times.table  # type: ignore[union-attr]

    def _idle(self, what: str) -> None:
        if self.has_work():
            raise RuntimeError(f"{what} needs an idle engine")

    def _prepare(self, progress: Callable[[str], None] | None, anew: bool = False) -> None:
        try:
            self.prepare(progress or (lambda line: None), anew)
        except BaseException as error:
            self._error = error  # the programs own the state while they run
            raise

    def watch(self, watcher: Watcher) -> None:
        """Calls ``watcher`` with a ``CycleReport`` of every cycle, when it is settled."""
        self._reports.watchers.append(watcher)

    def counters(self) -> dict[str, Any]:
        """Numbers since the start (``counters.NAMES``), ``buckets`` with the use of every decoding program,
        ``budgets`` with the requests by the drafts verified for them in a cycle, and what is there now: ``running``,
        ``waiting``, ``slots``, and ``step_time_ratio``, measured / predicted milliseconds of late."""
        return {
            **self._counters.snapshot(),
            "late_compiles": self._programs.late_compiles,
            "step_time_ratio": self._drift.ratio,
            "running": len(self._slots),
            "waiting": len(self._waiting),
            "slots": self.config.max_num_seqs,
        }

    # -- the five statements of a step -----------------------------------------------------------------------

    def _choose(self) -> Plan | None:
        """What the next cycle runs; None where nobody decodes."""
        working = [t for t in self._slots if t.may_emit]
        if not working:
            return None
        slots = self.buckets.slot_bucket(1 + max(t.slot or 0 for t in working))
        rows = tuple(t if t is not None and t.may_emit else None for t in self._slots.rows(slots))
        width = self.buckets.width
        cells = max(t.length_bound(width) for t in working) + width
        context, draft_context = self.buckets.context_bucket(cells, slots), self.buckets.draft_context(cells)
        # Pieces of prompts have taken their share of the step's tokens.
        spare = max(self.step_tokens - sum(size for size, _ in self._pieces), len(working))
        costs = self._costs(self._cycle, len(working), slots, context, draft_context, spare)
        crowded = bool(self._pieces) and spare < max(self.buckets.tokens[slots], default=0)
        other_ms = 0.0 if self._times is None else sum(self._times.piece_ms(*piece) for piece in self._pieces)
        decision = self._policy.decide(self._cycle, working, costs, Beside(crowded, other_ms, spare))
        self._last_drafts = decision.drafts
        return Plan(self._cycle, rows, decision, slots, context, draft_context)

    def _draft(self, plan: Plan | None) -> steps.Draft | None:
        """A block for every request that gets one, in a slot bucket of their own number; None where the cycle has no
        drafts."""
        if plan is None:
            return None
        working, least = plan.working, plan.least
        # An engine that never skips has no program for a cycle without drafts: it verifies none of those it makes.
        drafting = int((least != OUTSIDE).sum()) if plan.decision.drafts or not self.buckets.skips else 0
        self._counters.add("skipped_drafts", len(working) - drafting if self.buckets.drafts else 0)
        if not drafting:
            self._absorb([t for t in working if t.held == self.buckets.ring])
            return None
        self._absorb(working)
        self._counters.add("drafted", drafting * plan.width(self.buckets.drafts))
        calibration = np.ones((plan.slots, self.buckets.drafts), np.float32)
        shift = np.zeros(plan.slots, np.float32)
        for row, tenant in zip(plan.places, working, strict=True):
            estimate = self._policy.conditional(tenant)
            calibration[row] = tenant.correction.temperature if estimate is None else estimate
            shift[row] = tenant.correction.shift
        key = Key("draft", self.buckets.slot_bucket(drafting), plan.decision.width or 0, plan.draft_context)
        rows = plan.draft_slots(key.slots)
        self._counters.add("draft_rows", key.slots)
        total, threshold, most = plan.decision.drafts, self.config.confidence_threshold, plan.most(self.buckets.drafts)
        numbers = calibration[rows], shift[rows], least[rows], most[rows], rows
        return self._programs.draft(self._state, key, total, threshold, *numbers)

    def _verify(self, plan: Plan | None, draft: steps.Draft | None) -> None:
        """Dispatches the target's forward over everybody's anchor and admitted drafts."""
        if plan is None:
            return
        total = plan.decision.drafts
        admitted: Any = None if draft is None else draft.admitted
        if draft is not None and self._policy.reads_back:
            admitted, total = self._read_back(plan, draft)
        useful = len(plan.working) + total
        if draft is None or (total == 0 and self.buckets.skips):
            key, total = Key("plain", plan.slots, plan.slots, plan.context), 0
            held = np.array([0 if tenant is None else tenant.held for tenant in plan.rows], np.int32)
            self._state, packed = self._programs.plain(self._state, key, held)
            for tenant in plan.working:
                tenant.held += self.buckets.skips
        else:
            key = Key("verify", plan.slots, self.buckets.token_bucket(plan.slots, useful), plan.context)
            self._state, packed = self._programs.verify(self._state, key, draft.proposal, admitted)
        for tenant in plan.working:
            tenant.promised += 1
        self._counters.cycle(key, useful)
        self._counters.add("scheduled", total)
        self._counters.add("probes", plan.decision.probe)
        self._counters.add("fallback_cycles", plan.decision.fallback)
        alone, decodes = self._alone and not self._absorbed, self._alone
        flight = Flight(plan.rows, packed, plan, key, total, began=self._began, alone=alone, decodes=decodes)
        if draft is not None and self._policy.variable:
            flight = dataclasses.replace(flight, survival=draft.survival, tokens=draft.proposal.tokens)
        self._dispatched(flight)
        self._cycle += 1
        self._alone, self._absorbed = True, False

    def _settle(self, keep: int) -> None:
        """Reads what has been dispatched, but for the last ``keep`` cycles: emits, ends requests, frees slots."""
        flying = sum(flight.plan is not None for flight in self._flights)
        if self._saving and flying > keep:
            # They ran behind the first cycle that is read now: their milliseconds are none of its own.
            self._flights[0] = self._waited_for(self._flights[0])
        self._confirm()  # copies of the step before
        while self._flights and (self._flights[0].plan is None or flying > keep):
            flight = self._flights.popleft()
            flying -= flight.plan is not None
            out = steps.unpack(flight.packed)
            if flight.plan is not None:
                self._policy.observe(flight.plan.cycle, self._reports.settled(flight, out))
            for row, tenant in enumerate(flight.rows):
                if tenant is not None:
                    tenant.promised -= 1
                    if tenant.finish_reason is None:  # else it ended while this cycle ran
                        self._commit(tenant, flight, out, row)

    # -- their parts -----------------------------------------------------------------------------------------

    def _lag(self) -> int:
        """Cycles that stay unread behind the one just dispatched. The lagged scheduler keeps its lag where nothing
        overlaps, so that it decides alike."""
        return int((self.overlap and not self._policy.reads_back) or self._policy.lagged)

    def _absorb(self, tenants: Sequence[Tenant]) -> None:
        """Lets the drafter catch up with what these tenants hold back from it."""
        held = {tenant.slot or 0: tenant.held for tenant in tenants if tenant.held}
        if not held:
            return
        self._state = self._programs.absorb(self._state, held)
        self._counters.add("absorbed_later", sum(held.values()))
        self._absorbed = True
        for tenant in tenants:
            tenant.held = 0

    def _dispatched(self, flight: Flight) -> None:
        if not self.overlap:
            flight = self._waited_for(flight)
        else:
            for array in flight.arrays():
                array.copy_to_host_async()
        self._flights.append(flight)

    def _waited_for(self, flight: Flight) -> Flight:
        jax.block_until_ready(flight.packed)
        return flight if flight.over is not None else dataclasses.replace(flight, over=time.perf_counter())

    def _read_back(self, plan: Plan, draft: steps.Draft) -> tuple[np.ndarray, int]:
        """Drafts to verify ``[S]`` by the policy's reading of the draft, and their number."""
        admitted = np.zeros(self.config.max_num_seqs, np.int32)
        admitted[plan.places] = self._policy.lengths(
            plan.working,
            plan.decision,
            np.asarray(draft.admitted)[plan.places],
            np.asarray(draft.survival)[plan.places],
        )
        return admitted, int(admitted.sum())

    def _commit(self, tenant: Tenant, flight: Flight, out: steps.Emitted, row: int) -> None:
        """Adds a cycle's outcome (or a prefill's first token) to a request."""
        count = int(out.count[row])
        if count == 0 and not out.failed[row]:
            raise RuntimeError(f"request {tenant.id} is at work, but its cycle emitted nothing")
        event = self._event(tenant)
        new = out.tokens[row, :count].tolist()
        tenant.tokens += new
        event.tokens += new
        self._counters.add("tokens", count)
        if flight.plan is not None and count:
            offered = int(out.offered[row])
            for record in (tenant, event):
                record.committed.append(count)
                record.offered.append(offered)
            self._counters.commit(out, row)
            self._reports.regret(tenant, flight, out, row)
        if not out.failed[row]:
            self._kept(tenant, flight, bool(out.finished[row]))
        if out.finished[row]:
            self._end(tenant, "error" if out.failed[row] else "stop" if out.stopped[row] else "length")
            self._release(tenant)

    def _end(self, tenant: Tenant, reason: str) -> None:
        tenant.finish_reason = reason
        event = self._event(tenant)
        event.finished, event.finish_reason, event.result = True, reason, tenant.result()
        self._counters.add({"cancelled": "cancelled", "error": "failed"}.get(reason, "finished"))
