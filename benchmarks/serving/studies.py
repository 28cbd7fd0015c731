"""What the simulator is asked: curves of load, a change of text in the middle, agreement with a real engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.schedule import StepTimeTable

from .arms import Arm
from .arrivals import Closed, Poisson
from .simulator import Clock, Server, Simulation
from .traces import Traces

Row = dict[str, Any]


def closed_curve(
    arm: Arm,
    traces: Traces,
    clock: Clock,
    loads: Sequence[int],
    *,
    request_cycles: int = 100_000,
    least_cycles: int = 1500,
    seed: int = 0,
) -> list[Row]:
    """One arm at every load: closed loop, prompts run elsewhere.

    Args:
        request_cycles: of the measured part, at least; few users need many cycles to see many texts.
    """
    rows = []
    for users in loads:
        begin = time.perf_counter()
        simulation = Simulation(arm, traces, clock, Closed(users), Server(slots=users), seed=seed, ages=users)
        simulation.run(cycles=200)
        found = simulation.run(cycles=max(least_cycles, request_cycles // users))
        found["wall_s"] = round(time.perf_counter() - begin, 2)
        rows.append({"arm": arm.name, "concurrency": users, **found})
    return rows


def poisson_curve(
    arm: Arm, traces: Traces, clock: Clock, rates: Sequence[float], *, seconds: float, slots: int, seed: int = 0
) -> list[Row]:
    """One arm at every rate of arrivals (requests per second), from an empty server; a fifth of the time is warm-up."""
    rows = []
    for rate in rates:
        simulation = Simulation(arm, traces, clock, Poisson(rate, seed), Server(slots=slots), seed=seed)
        simulation.run(seconds=seconds / 5)
        rows.append({"arm": arm.name, "rate": rate, **simulation.run(seconds=seconds)})
    return rows


def bars(rows: Sequence[Row], loads: Sequence[int]) -> list[Row]:
    """The adaptive arm against the best fixed number of drafts (none included), by load."""
    found = []
    for users in loads:
        own = {row["arm"]: row for row in rows if row["concurrency"] == users}
        fixed = {name: row for name, row in own.items() if name.split()[0] in ("none", "fixed")}
        best = max(fixed, key=lambda name: fixed[name]["tokens_per_s"])
        ratio = own["adaptive"]["tokens_per_s"] / fixed[best]["tokens_per_s"]
        found.append({
            "concurrency": users,
            "best_fixed": best,
            "ratio": round(ratio, 4),
            "drafts_per_request": own["adaptive"]["drafts_per_request"],
        })  # fmt: skip
    return found


def rises(found: Sequence[Row], tolerance: float = 0.0) -> list[int]:
    """Loads at which more drafts a request are admitted than at any smaller one, by more than a share ``tolerance``."""
    least, rising = math.inf, []
    for row in found:
        drafts = row["drafts_per_request"]
        if drafts > (1.0 + tolerance) * least:
            rising.append(row["concurrency"])
        least = min(least, drafts)
    return rising


def switch(
    arm: Arm,
    before: Traces,
    after: Traces,
    clock: Clock,
    users: int,
    *,
    cycles: int = 200,
    runs: int = 32,
    seed: int = 0,
) -> Row:
    """All requests change from one kind of text to another in the same cycle.

    Returns:
        ``half_way``, ``nine_tenths``: the first cycle after the change (0: the changed cycle itself) in which the
        budget, averaged over ``runs``, has gone that far towards its new level (means over half of ``cycles``).
        ``budgets``: from 8 cycles before the change on.
    """
    curves = []
    for run in range(runs):
        simulation = Simulation(arm, before, clock, Closed(users), Server(slots=users), seed=seed + run, ages=users)
        simulation.run(cycles=cycles)
        simulation.use(after)
        simulation.run(cycles=cycles)
        curves.append(simulation.budgets)
    budgets = np.mean(curves, axis=0)
    old, new = budgets[cycles // 2 : cycles].mean(), budgets[cycles + cycles // 2 :].mean()

    def reached(share: float) -> int | None:
        there = np.flatnonzero(np.abs(budgets[cycles:] - old) >= share * abs(new - old))
        return int(there[0]) if there.size else None

    return {
        "arm": arm.name,
        "mode": arm.mode,
        "concurrency": users,
        "budget_before": round(float(old), 3),
        "budget_after": round(float(new), 3),
        "half_way": reached(0.5),
        "nine_tenths": reached(0.9),
        "budgets": [round(float(b), 3) for b in budgets[cycles - 8 : cycles + 24]],
    }


def validate(
    arms: Sequence[Arm],
    traces: Traces,
    tables: Mapping[str, StepTimeTable],
    prompt_ms: Mapping[str, float],
    measured: Mapping[tuple[str, int], float],
    *,
    context: int,
    seconds: float = 180.0,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Simulated against measured tokens per second on this machine.

    Args:
        tables: step times of each arm's own programs; the adaptive arm's are also those it decides by here, while the
            engine decided by those it had at its start. prompt_ms: of each arm.
        measured: tokens per second by arm and number of users.
    """
    rows = []
    for (name, users), real in sorted(measured.items(), key=lambda item: (item[0][1], item[0][0])):
        arm = next(arm for arm in arms if arm.name == name)
        # An adaptive engine's table begins with the step without drafts, whose program holds the whole slot bucket.
        clock = Clock(tables[name], context, measured=arm.mode == "lagged")
        # The engine may run several short prompts in a step; in a closed loop few end in the same one.
        server = Server(slots=users, prompt_ms=prompt_ms[name], prompts_a_step=1)
        simulation = Simulation(arm, traces, clock, Closed(users), server, ages=users)
        simulation.run(seconds=seconds / 10)
        found = simulation.run(seconds=seconds)
        ratio = found["tokens_per_s"] / real
        rows.append({"arm": name, "concurrency": users, "measured": real, "simulated": found["tokens_per_s"],
                     "ratio": round(ratio, 3), "ok": abs(ratio - 1.0) <= 0.15,
                     "drafts_per_request": found["drafts_per_request"]})  # fmt: skip
        say(f"{users} users, {name}: simulated / measured {ratio:.3f}")
    return rows
