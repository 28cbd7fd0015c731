"""A simulated engine: the real scheduler, on step times from a table and acceptance from traces.

A discrete-event simulation of ``engine/loop.py``. Decisions come from the engine's own policy objects
(``choose_policy``) with the engine's own tenants, step-time curves and lag: a cycle is settled one cycle late where
cycles overlap, so a request that has ended takes part in one more forward, empty (unless one token was left, so that it
was known to end), and its slot is free after that. What a device would compute is looked up: the confidences of a block
and how much of it is accepted (``traces.py``), and the milliseconds of the step. What is left out: moves between slots
(a batch of R requests runs in the smallest slot bucket that holds R), the absorption of held tokens, and the host's own
time unless ``host_ms`` says it. A block that is narrower than those of the traces is taken to be the beginning of one;
a drafter may do better (or worse) in it than that.

Everything about requests that the policies do not look at is a NumPy array over slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dspark_jax import EngineConfig, Sampling
from dspark_jax.engine.estimates import Score
from dspark_jax.engine.modes import choose_policy
from dspark_jax.engine.policy import OUTSIDE, Beside, Decision
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import Tenant
from dspark_jax.engine.step_times import StepTimes
from dspark_jax.schedule import StepTimeTable, admit_threshold, admit_top_k

from .arms import Arm
from .arrivals import Closed, Poisson
from .traces import Traces

Watcher = Callable[[int, list[int], np.ndarray, int], None]


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """What ``choose_policy`` asks of a drafter."""

    block_size: int
    has_confidence: bool = True

    @property
    def max_drafts(self) -> int:
        return self.block_size


class Clock:
    """Step times of a batch of any size at one context length.

    Args:
        table: rows by slots and context. measured: by an engine, see ``StepTimes``.
        draft_scale: of the table's draft times, for another drafter than the one it was made for.
    """

    def __init__(self, table: StepTimeTable, context: int, measured: bool, draft_scale: float = 1.0) -> None:
        self._table, self._context, self._scale = table, context, draft_scale
        self._times = StepTimes(table, measured)
        self._curves: dict[int, StepTimeTable] = {}
        self._drafts: dict[tuple[int, int | None], float] = {}

    def widths(self) -> tuple[int, ...]:
        """Drafts of the narrower blocks that the table knows a time of, for whatever batch."""
        rows = self._table.rows or (self._table,)
        return tuple(sorted({width for row in rows for width, _ in row.draft_ms_by_width}))

    def curve(self, requests: int) -> StepTimeTable:
        """Verify times of a batch of ``requests``."""
        if requests not in self._curves:
            last = self._table.at(self._context, requests).last
            self._curves[requests] = self._times.curve(requests, requests, self._context, last)
        return self._curves[requests]

    def draft_ms(self, drafting: int, width: int | None = None) -> float:
        """Of a block of ``width`` (None: a whole one) for each of ``drafting`` requests: the draft batch is no larger
        than it must be. Infinite where the table knows no time of that width."""
        place = drafting, width
        if place not in self._drafts:
            row = self._table.at(self._context, max(drafting, 1))
            known = width is None or width in dict(row.draft_ms_by_width)
            ms = self._times.draft_ms(max(drafting, 1), self._context, width) if known else math.inf
            self._drafts[place] = self._scale * ms
        return self._drafts[place]


@dataclasses.dataclass(frozen=True)
class Server:
    """Attributes:
    slots: requests decoded at once. prompt_ms: of a prompt on this device; 0: prompts run elsewhere.
    prompts_a_step: at most so many begin between two cycles; None: as many as there is room for. The engine runs at
        least one, and as many as fit into what decoding leaves of a step's tokens.
    host_ms: of a cycle, where nothing hides it.
    """

    slots: int = 1024
    prompt_ms: float = 0.0
    prompts_a_step: int | None = None
    host_ms: float = 0.0


@dataclasses.dataclass
class Sums:
    """What is added up between two marks."""

    seconds: float = 0.0
    cycles: int = 0
    tokens: int = 0
    request_cycles: int = 0  # of requests at work
    offered: int = 0
    accepted: int = 0
    finished: int = 0
    latency_s: float = 0.0  # of those that finished, from arrival to end
    busy_ms: float = 0.0  # of cycles alone

    def result(self) -> dict[str, Any]:
        def ratio(a: float, b: float) -> float | None:
            return round(a / b, 4) if b else None

        active = self.request_cycles / self.cycles if self.cycles else 0.0
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return {
            "tokens_per_s": round(speed, 3),
            "tokens_per_s_user": round(speed / active, 3) if active else None,
            "drafts_per_request": ratio(self.offered, self.request_cycles),
            "acceptance": ratio(self.accepted, self.offered),
            "cycle_ms": ratio(self.busy_ms, self.cycles),
            "mean_active": round(active, 2),
            "mean_latency_s": ratio(self.latency_s, self.finished),
            "finished": self.finished,
            "cycles": self.cycles,
            "simulated_s": round(self.seconds, 3),
        }


class Simulation:
    """One arm under one load.

    Args:
        traces: of its drafter. clock: its step times.
        seed: of the order in which texts are asked for: equal for equal seeds, whatever the arm.
        ages: so many first requests begin anywhere in their texts, as if the load had lasted for long.
        order: texts of the first requests. watch: told of every cycle: its number, the requests at work by their
            numbers (from 1), the drafts verified for each, and those the forward was chosen by.

    Attributes:
        now: seconds. budgets: drafts a request at work, one entry a cycle; admitted, released: requests so far.
    """

    def __init__(
        self,
        arm: Arm,
        traces: Traces,
        clock: Clock,
        arrivals: Closed | Poisson,
        server: Server | None = None,
        *,
        seed: int = 0,
        ages: int = 0,
        order: Sequence[int] = (),
        watch: Watcher | None = None,
    ) -> None:
        server = Server() if server is None else server
        drafts = traces.width if arm.drafts is None else arm.drafts
        narrow = tuple(width for width in clock.widths() if width < drafts)  # those that the table has a time of
        config = EngineConfig(
            mode=arm.mode,
            num_speculative_tokens=arm.drafts,
            confidence_threshold=arm.threshold,
            draft_widths=(*narrow, drafts),
        )
        drafter = None if arm.mode == "none" else DrafterShape(traces.width)
        self.arm, self.clock, self.arrivals, self.server = arm, clock, arrivals, server
        self.mode, self.policy, _ = choose_policy(config, drafter)
        overlaps = not self.policy.reads_back
        self._keep = int(overlaps or self.policy.lagged)
        self._host_ms = 0.0 if overlaps else server.host_ms
        self._rng, self._ages, self._order = np.random.default_rng(seed), ages, deque[int]()
        self.now, self.cycle, self.sums = 0.0, 0, Sums()
        self.admitted = self.released = 0
        self.budgets: list[float] = []
        self._waiting: deque[float] = deque()
        self._tenants: list[Tenant | None] = [None] * server.slots
        self._busy, self._arrived = np.zeros(server.slots, bool), np.zeros(server.slots)
        self._at, self._end = np.zeros(server.slots, np.int64), np.zeros(server.slots, np.int64)
        self._quiet = np.zeros(server.slots, bool)  # has a slot, and is known to need no further cycle
        self._flights: deque[tuple[int, list[Score], np.ndarray]] = deque()
        self._watch = watch
        self.use(traces)
        self._order.extend(order)

    def use(self, traces: Traces) -> None:
        """Requests go on in texts of ``traces``, those at work from anywhere in one."""
        self.traces = traces
        self._raw = traces.conditional() if self.policy.rule == "threshold" else None
        self._order.clear()
        # Adaptive arms verify some number of drafts: half a block is near enough for where their requests stand.
        self._anchors = traces.anchors(self.policy.drafts if self.arm.fixed else traces.width // 2)
        for slot in np.flatnonzero(self._end > self._at):
            self._begin(int(slot), anywhere=True)

    def _text(self) -> int:
        """The next one to be asked for; each pass over all of them has its own order."""
        if not self._order:
            self._order.extend(self._rng.permutation(self.traces.texts).tolist())
        return self._order.popleft()

    def _begin(self, slot: int, anywhere: bool) -> None:
        if anywhere:
            at = int(self._rng.choice(self._anchors))
            text = int(np.searchsorted(self.traces.starts, at, side="right")) - 1
        else:
            text = self._text()
            at = int(self.traces.starts[text])
        self._at[slot], self._end[slot] = at, int(self.traces.starts[text + 1])

    # -- a step, in the engine's order -----------------------------------------------------------------------

    def step(self) -> None:
        """Admits, and runs one cycle; where nobody is at work, time passes until somebody comes."""
        begun = self._admit()
        rows = np.flatnonzero(self._busy & ~self._quiet)
        if not rows.size:
            if self._flights:
                return self._settle(0)  # what it frees will be taken in the next step
            if math.isinf(self.arrivals.next_time()):
                raise RuntimeError("nobody is at work and nobody will come")
            self._pass(self.arrivals.next_time() - self.now)
            return
        self._pass(begun * self.server.prompt_ms / 1e3)
        self.sums.tokens += begun  # the one that ends a prompt
        self._cycle(rows, begun * self.server.prompt_ms)
        self._settle(self._keep)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.sums.seconds += seconds

    def _admit(self) -> int:
        """Gives free slots to those who wait. Returns how many prompts ran."""
        while self.arrivals.next_time() <= self.now:
            self._waiting.append(self.arrivals.take())
        free = np.flatnonzero(~self._busy).tolist() if self._waiting else []
        count = min(len(free), len(self._waiting), self.server.prompts_a_step or len(free))
        for slot in free[:count]:
            self.admitted += 1
            request = Checked((0,), 1, Sampling(temperature=0.0), None, True, ())
            self._tenants[slot] = Tenant(self.admitted, request, self.admitted, slot=slot, decoding=True)
            self._busy[slot], self._quiet[slot], self._arrived[slot] = True, False, self._waiting.popleft()
            self._begin(slot, anywhere=self.admitted <= self._ages)
        return count

    def _cycle(self, rows: np.ndarray, other_ms: float) -> None:
        tenants: list[Any] = [self._tenants[row] for row in rows]
        curve = self.clock.curve(rows.size)

        def costs(drafting: Sequence[bool], width: int | None = None) -> tuple[StepTimeTable, float]:
            return curve, self.clock.draft_ms(sum(drafting), width)

        decision = self.policy.decide(
            self.cycle, tenants, costs if self.policy.timed else None, Beside(other_ms=other_ms)
        )
        alive = self._end[rows] > self._at[rows]
        at = np.where(alive, self._at[rows], 0)
        ms, lengths, total, survival = curve.ms(rows.size) + self._host_ms, np.zeros(rows.size, np.int64), 0, None
        inside = alive & (decision.least != OUTSIDE)
        drafting = int((decision.least != OUTSIDE).sum())
        if decision.drafts and drafting:
            survival = np.where(inside[:, None], self.traces.survival[at, : self.policy.drafts], 0.0)
            if decision.width is not None:
                survival[:, decision.width :] = 0.0
            lengths, total = self._lengths(tenants, decision, survival, at, inside)
            ms += self.clock.draft_ms(drafting, decision.width)
            if total or not self.policy.skips:  # else the step without drafts runs
                tokens = rows.size + max(total, 1)
                ms += curve.ms(min(tokens, curve.last)) - curve.ms(rows.size)
        accepted = np.minimum(self.traces.accepted[at], lengths)
        left = self._end[rows] - self._at[rows]
        kept = np.where(alive, np.minimum(accepted + 1, left), 0)
        self._at[rows] += kept
        self._quiet[rows[left == 1]] = True  # whatever this cycle brings, it was the last one
        scores: list[Score] = []
        if survival is not None and self.policy.timed:
            scored = zip(tenants, survival, lengths.tolist(), accepted.tolist(), inside.tolist(), strict=True)
            scores = [Score(t, row, n, m, width=decision.width) for t, row, n, m, drafted in scored if drafted]
        self._flights.append((self.cycle, scores, rows[alive & (self._at[rows] >= self._end[rows])]))
        if self._watch is not None:
            working = [tenant.id for tenant, there in zip(tenants, alive, strict=True) if there]
            self._watch(self.cycle, working, lengths[alive], total)
        self._pass(ms / 1e3)
        self._count(ms, int(alive.sum()), int(lengths.sum()), int(accepted[alive].sum()), int(kept.sum()))
        self.cycle += 1

    def _lengths(
        self, tenants: list[Any], decision: Decision, survival: np.ndarray, at: np.ndarray, inside: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Drafts verified for each request, and those that the size of the forward is chosen by."""
        if self.policy.rule == "top_k":
            found = top_k(survival, decision.least, decision.drafts)
        elif self._raw is not None:
            found = admit_threshold(self._raw[at, : self.policy.drafts], self.arm.threshold)
        else:
            found = np.full(len(tenants), self.policy.drafts)
        found = np.where(inside, found if decision.most is None else np.minimum(found, decision.most), 0)
        if not self.policy.reads_back:
            return found, decision.drafts
        found = np.asarray(self.policy.lengths(tenants, decision, found, survival))
        return found, int(found.sum())

    def _settle(self, keep: int) -> None:
        while len(self._flights) > keep:
            cycle, scores, ended = self._flights.popleft()
            self.policy.observe(cycle, scores)
            for slot in ended.tolist():
                self._tenants[slot], self._busy[slot] = None, False
                self.released += 1
                self.sums.finished += 1
                self.sums.latency_s += self.now - self._arrived[slot]
                self.arrivals.answered(self.now)

    def _count(self, ms: float, working: int, offered: int, accepted: int, kept: int) -> None:
        self.sums.cycles += 1
        self.sums.busy_ms += ms
        self.sums.request_cycles += working
        self.sums.offered += offered
        self.sums.accepted += accepted
        self.sums.tokens += kept
        self.budgets.append(offered / max(working, 1))

    # -- for callers -----------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Requests that hold a slot."""
        return int(self._busy.sum())

    def run(self, cycles: int = 0, seconds: float = 0.0) -> dict[str, Any]:
        """Runs at least so many cycles and seconds. Returns what they added up to, and forgets it."""
        self.sums = Sums()
        while self.sums.cycles < cycles or self.sums.seconds < seconds:
            self.step()
        return self.sums.result()


def top_k(survival: np.ndarray, least: np.ndarray, total: int) -> np.ndarray:
    """``[N]`` what the engine's draft program admits: the first ``least`` drafts of each, then the likeliest.

    Halving the others keeps their order exactly and puts all of them below the forced ones.
    """
    forced = (np.arange(survival.shape[1]) < least[:, None]) & (survival > 0)
    return admit_top_k(np.where(forced, 1.0, 0.5 * survival), total)
