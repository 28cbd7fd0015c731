"""What a cycle is said to have taken is its own time, whatever runs before and behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dspark_jax.engine import Engine, loop, report
from dspark_jax.engine.flight import Flight
from tests.engine.cases import as_new, fresh, random_requests, run_all


class Clock:
    """Seconds that pass only when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (loop, report):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=found))
    return found


@pytest.fixture
def reports() -> list[Any]:
    return []


def test_the_serial_twin_measures_every_cycle_by_itself(
    lagged_engine: Engine, clock: Clock, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle takes a millisecond a token. It is read behind the next one, for the sake of the scheduler's lag, and
    that one's time is none of its own."""
    engine = as_new(lagged_engine, overlap=False)
    dispatched = engine._dispatched

    def run(flight: Flight) -> None:
        clock.now += 1e-3 * (0 if flight.key is None else flight.key.tokens)
        dispatched(flight)

    monkeypatch.setattr(engine, "_dispatched", run)
    engine.watch(reports.append)
    run_all(engine, random_requests(6, seed=2))
    engine._reports.watchers.clear()
    measured = [(report.measured_ms, report.tokens) for report in reports if report.measured_ms is not None]
    assert len({tokens for _, tokens in measured}) > 1
    assert [ms for ms, _ in measured] == pytest.approx([tokens for _, tokens in measured])


def test_copies_behind_a_cycle_are_none_of_its_time(
    fixed_engine: Engine, clock: Clock, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an ended request has cached is kept for others: the copy runs behind a cycle in flight that was alone. Here
    copies take a second, and cycles nothing."""
    engine = fresh(fixed_engine)
    confirm = engine._confirm

    def slow() -> None:
        clock.now += bool(engine._saving)
        confirm()

    monkeypatch.setattr(engine, "_confirm", slow)
    engine.watch(reports.append)
    run_all(engine, random_requests(6, seed=2))
    engine._reports.watchers.clear()
    measured = [report.measured_ms for report in reports if report.measured_ms is not None]
    assert clock.now > 0 and measured and max(measured) == 0.0
