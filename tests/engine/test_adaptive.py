"""Modes that choose the verification length: what must not depend on it does not, and equal seeds are kept apart."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.engine.slots import claim_seed
from dspark_jax.schedule import admit_early_stop
from tests.engine.cases import engine_config, expected, fresh, random_requests, run_all, step_times


@pytest.fixture(scope="session")
def lagged_engine(models: Any) -> Engine:
    with jax.enable_x64(True):
        config = engine_config(
            mode="lagged", step_time=step_times(), slot_buckets=(4,), token_buckets=(8, 12), prefill_buckets=(8,)
        )
        return Engine(*models, config)


def lagged_twin(engine: Engine, overlap: bool) -> Engine:
    """As new: the prior as well."""
    engine._policy.__init__(engine._policy.drafts)  # type: ignore[misc]
    return fresh(engine, overlap=overlap)


def test_coupled_and_greedy_texts_do_not_depend_on_the_schedule(lagged_engine: Engine, models: Any) -> None:
    requests = random_requests(9, seed=1, verification="coupled")
    got = run_all(lagged_twin(lagged_engine, True), requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    counters = lagged_engine.counters()
    assert 0 < counters["offered"] < counters["drafted"]
    assert len([name for name in counters["buckets"] if name.startswith("verify")]) > 1


def test_the_serial_twin_makes_the_same_decisions(lagged_engine: Engine) -> None:
    """`rejection` texts depend on the lengths, so every capacity must be the same with and without overlap."""
    requests = random_requests(9, seed=2)
    runs = [run_all(lagged_twin(lagged_engine, overlap), requests) for overlap in (True, False)]
    assert runs[0] == runs[1]


def test_equal_seeds_that_compete_are_told_apart(lagged_engine: Engine) -> None:
    """Three `rejection` requests alike: the seed, then hash(seed, 1), hash(seed, 2); one that enters after the first
    has ended has the seed itself again; `coupled` requests share theirs."""
    engine = lagged_twin(lagged_engine, True)
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


def test_a_cycle_without_drafts_runs_the_plain_program(models: Any) -> None:
    """Where drafts never pay the engine decodes plainly, and probes now and then."""
    config = engine_config(
        mode="lagged", step_time=step_times(slope=50.0), slot_buckets=(4,), token_buckets=(8,), prefill_buckets=(8,)
    )
    engine = Engine(*models, config)
    requests = random_requests(4, seed=3, verification="coupled")
    got = run_all(engine, requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    counters = engine.counters()
    assert counters["skipped_drafts"] > 0
    assert sum(n for name, n in counters["buckets"].items() if name.startswith("verify")) in (1, 2)


def test_early_stop_admits_what_algorithm_1_says(models: Any, monkeypatch: Any) -> None:
    """The host reads survivals back and runs the same function as the scheduler's own tests."""
    config = engine_config(
        mode="early_stop", step_time=step_times(), slot_buckets=(4,), token_buckets=(8,), prefill_buckets=(8,)
    )
    engine = Engine(*models, config)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    lengths = engine._policy.lengths

    def watched(admitted: np.ndarray, survival: np.ndarray, table: Any) -> np.ndarray:
        seen.append((survival, lengths(admitted, survival, table)))
        return seen[-1][1]

    monkeypatch.setattr(engine._policy, "lengths", watched)
    requests = random_requests(4, seed=4, verification="coupled")
    got = run_all(engine, requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    for survival, chosen in seen:
        np.testing.assert_array_equal(chosen, admit_early_stop(survival, step_times(), 0.1))
    assert sum(int(chosen.sum()) for _, chosen in seen) >= engine.counters()["offered"] > 0


def test_a_table_that_is_too_short_is_refused_at_start_up(models: Any) -> None:
    from dspark_jax.schedule import StepTimeTable

    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 2.0])
    with pytest.raises(ValueError, match="step_time: its last entry is 2 tokens, but 4 requests may run"):
        Engine(*models, engine_config(mode="lagged", step_time=table))
