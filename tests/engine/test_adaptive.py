"""Modes that choose the verification length: what must not depend on it does not, and equal seeds are kept apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.engine.policy import EarlyStop, Lagged
from dspark_jax.engine.slots import claim_seed
from dspark_jax.schedule import StepTimeTable, admit_early_stop
from tests.engine.cases import BLOCK, Models, engine_config, expected, fresh, random_requests, run_all, step_times


def as_new(engine: Engine, overlap: bool = True) -> Engine:
    """Without requests and without what its policy has learned."""
    engine._policy = Lagged(engine.buckets.drafts)
    return fresh(engine, overlap=overlap)


def test_coupled_and_greedy_texts_do_not_depend_on_the_schedule(lagged_engine: Engine, models: Models) -> None:
    requests = random_requests(9, seed=1, verification="coupled")
    got = run_all(as_new(lagged_engine), requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    counters = lagged_engine.counters()
    assert 0 < counters["offered"] < counters["drafted"]
    assert len([name for name in counters["buckets"] if name.startswith("verify")]) > 1


def test_the_serial_twin_makes_the_same_decisions(lagged_engine: Engine) -> None:
    """`rejection` texts depend on the lengths, so every capacity must be the same with and without overlap."""
    requests = random_requests(9, seed=2)
    runs = [run_all(as_new(lagged_engine, overlap), requests) for overlap in (True, False)]
    assert runs[0] == runs[1]


def test_equal_seeds_that_compete_are_told_apart(lagged_engine: Engine) -> None:
    """Three `rejection` requests alike: the seed, then hash(seed, 1), hash(seed, 2); one that enters after the first
    has ended has the seed itself again; `coupled` requests share theirs."""
    engine = as_new(lagged_engine)
    same = Request([1, 2], 12, Sampling(1.0), 5, "rejection")
    ids = [engine.submit(same) for _ in range(3)]
    coupled = [engine.submit(Request([1, 2], 12, Sampling(1.0), 5)) for _ in range(2)]
    held: dict[int, int] = {}
    results: dict[int, Any] = {}
    while engine.has_work():
        results |= {e.id: e.result for e in engine.step() if e.finished}
        held |= {t.id: t.seed for t in engine._slots}
    second = claim_seed(5, {5})
    assert [held[i] for i in ids] == [5, second, claim_seed(5, {5, second})]
    assert len({tuple(results[i].tokens) for i in ids}) == 3
    assert results[coupled[0]].tokens == results[coupled[1]].tokens
    again = engine.submit(same)
    engine.step()
    assert [t.seed for t in engine._slots if t.id == again] == [5]


def test_a_cycle_without_drafts_runs_the_plain_program(lagged_engine: Engine, models: Models, monkeypatch: Any) -> None:
    """Where drafts never pay the engine decodes plainly, and probes now and then."""
    engine = as_new(lagged_engine)
    steep = dataclasses.replace(engine.config, step_time=step_times(slope=50.0))
    monkeypatch.setattr(engine, "config", steep)
    requests = random_requests(4, seed=3, verification="coupled", max_new_tokens=16)
    before = engine.counters()
    got = run_all(engine, requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    after = engine.counters()
    assert after["skipped_drafts"] - before["skipped_drafts"] > 40
    assert 0 < after["drafted"] - before["drafted"] <= 2 * 4 * BLOCK


def test_early_stop_admits_what_algorithm_1_says(lagged_engine: Engine, models: Models, monkeypatch: Any) -> None:
    """The host reads survivals back and runs the same function as the scheduler's own tests."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    class Seen(EarlyStop):
        def lengths(self, admitted: np.ndarray, survival: np.ndarray, table: Any) -> np.ndarray:
            seen.append((survival, super().lengths(admitted, survival, table)))
            return seen[-1][1]

    engine = as_new(lagged_engine)
    engine._policy = Seen(BLOCK)
    requests = random_requests(4, seed=4, verification="coupled")
    got = run_all(engine, requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    for survival, chosen in seen:
        np.testing.assert_array_equal(chosen, admit_early_stop(survival, step_times(), 0.1))
    assert sum(int(chosen.sum()) for _, chosen in seen) >= sum(sum(g[2]) for g in got) > 0


def test_a_table_that_is_too_short_is_refused_at_start_up(models: Models) -> None:
    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 2.0])
    with pytest.raises(ValueError, match="step_time: its last entry is 2 tokens, but 4 requests may run"):
        Engine(*models, engine_config(mode="lagged", step_time=table))
