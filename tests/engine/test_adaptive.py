"""Modes that choose the verification length: what must not depend on it does not, and equal seeds are kept apart."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.engine.adaptive import Current, EarlyStop, Lagged
from dspark_jax.engine.counters import Counters
from dspark_jax.engine.flight import Flight, Plan
from dspark_jax.engine.policy import Decision
from dspark_jax.engine.report import Reports
from dspark_jax.engine.request import Checked
from dspark_jax.engine.seeds import claim_seed
from dspark_jax.engine.slots import Tenant
from dspark_jax.engine.step_times import StepTimes
from dspark_jax.engine.steps import Emitted
from dspark_jax.schedule import StepTimeTable, admit_early_stop
from dspark_jax.testing import ScriptedDrafter, context_index
from tests.engine.cases import (
    BLOCK,
    VOCAB,
    Models,
    as_new,
    engine_config,
    expected,
    random_requests,
    run_all,
    step_times,
)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What has been counted meanwhile."""
    change = {name: after[name] - number for name, number in before.items() if isinstance(number, int | float)}
    budgets = {k: n - before["budgets"].get(k, 0) for k, n in after["budgets"].items()}
    return {**change, "budgets": budgets}


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


def test_a_cycle_without_drafts_runs_the_plain_program(lagged_engine: Engine, models: Models) -> None:
    """Where drafts never pay the engine decodes plainly, and probes now and then."""
    engine = as_new(lagged_engine)
    engine._times = StepTimes(step_times(slope=50.0), measured=False)
    requests = random_requests(4, seed=3, verification="coupled", max_new_tokens=16)
    before = engine.counters()
    reports: list[Any] = []
    engine.watch(reports.append)
    got = run_all(engine, requests)
    engine._reports.watchers.clear()
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    # A probe catches up first: its milliseconds are told, though no table has them.
    absorbing = [r for r in reports if r.measured_ms is None and r.decoding_ms is not None]
    assert absorbing and all(r.probe for r in absorbing)
    assert all(r.measured_ms in (None, r.decoding_ms) for r in reports)
    assert any(r.decoding_ms is None for r in reports)  # beside prompts
    change = difference(before, engine.counters())
    assert change["skipped_drafts"] > 40 and change["probes"] > 0
    assert 0 < change["drafted"] <= 2 * 4 * BLOCK
    assert change["absorbed_later"] > 0


def test_a_drafter_that_was_not_asked_drafts_as_if_it_had_been(lagged_engine: Engine, models: Models) -> None:
    """Cycles without drafts come and go: what waited is absorbed when drafting resumes.
    A wrong or missing cell of its context is NaN, and a block drafted from NaN is token 0: here every block that a
    request drafts must be what the tables say behind its text."""
    engine = as_new(lagged_engine)
    target, drafter = models
    blocks: list[tuple[int, int]] = []

    class Choppy(Lagged):
        """Drafts in one of five cycles, for everyone."""

        def decide(self, cycle: int, tenants: Any, costs: Any, *beside: Any) -> Any:
            decision = super().decide(cycle, tenants, costs, *beside)
            if cycle % 5:
                return dataclasses.replace(decision, drafts=0)
            return dataclasses.replace(decision, drafts=BLOCK * len(tenants), least=np.full(len(tenants), BLOCK))

    engine._policy = Choppy(BLOCK)
    greedy = Sampling(temperature=0.0)
    requests = [Request(r.prompt_ids, 16 - 3 * i, greedy, 1) for i, r in enumerate(random_requests(4, seed=11))]
    ids = [engine.submit(request) for request in requests]
    settled = engine._reports.settled

    def look(flight: Any, out: Any) -> Any:
        for row, tenant in enumerate(flight.rows):
            if flight.tokens is not None and tenant is not None and out.count[row]:
                text = [*tenant.request.prompt, *tenant.tokens]
                for k, token in enumerate(np.asarray(flight.tokens)[row].tolist()):
                    index = int(context_index(jnp.asarray([VOCAB, *text][-2:]), VOCAB))
                    assert token == int(np.argmax(drafter.table[k, index]))
                    text.append(token)
                blocks.append((tenant.id, len(tenant.tokens)))
        return settled(flight, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._reports, "settled", look)
        before = engine.counters()
        results = engine.run()
    assert [results[i].tokens for i in ids] == [e[0] for e in expected(models, requests)]
    change = difference(before, engine.counters())
    assert len(blocks) >= 6 and change["absorbed_later"] > 10


def test_what_waits_is_bounded(lagged_engine: Engine, models: Models, monkeypatch: Any) -> None:
    """A full ring is absorbed even where nothing is drafted."""
    engine = as_new(lagged_engine)
    engine._times = StepTimes(step_times(slope=50.0), measured=False)
    monkeypatch.setattr(type(engine.buckets), "ring", 4)
    requests = random_requests(3, seed=3, verification="coupled", max_new_tokens=16)
    waiting: list[int] = []
    engine.watch(lambda report: waiting.extend(t.held for t in engine._slots))
    got = run_all(engine, requests)
    engine._reports.watchers.clear()
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    assert max(waiting) == 4


def test_the_drafter_does_nothing_in_a_cycle_without_drafts(models: Models) -> None:
    """What the program of such a cycle traces of a drafter is nothing; the verify program absorbs."""
    target, drafter = models
    worked: list[str] = []

    class Counting(ScriptedDrafter):
        def absorb(self, *arguments: Any) -> Any:
            worked.append("absorb")
            return super().absorb(*arguments)

        def propose(self, *arguments: Any) -> Any:
            worked.append("propose")
            return super().propose(*arguments)

    fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
    engine = Engine(target, Counting(**fields), engine_config(mode="lagged", slot_buckets=(4,), step_time=step_times()))
    engine._programs._last_proposal(engine._state)  # its shape is traced once
    work = {}
    for kind in ("plain", "draft", "verify"):
        worked.clear()
        key = next(key for key in engine.buckets.keys(20) if key.kind == kind)
        engine._programs._lower(key, engine._programs._example(key, engine._state))
        work[kind] = list(worked)
    assert work == {"plain": [], "draft": ["propose"], "verify": ["absorb"]}


def test_early_stop_admits_what_algorithm_1_says(lagged_engine: Engine, models: Models) -> None:
    """The host reads survivals back and runs the same function as the scheduler's own tests."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    class Seen(EarlyStop):
        def lengths(self, tenants: Any, decision: Any, admitted: np.ndarray, survival: np.ndarray) -> np.ndarray:
            seen.append((survival, super().lengths(tenants, decision, admitted, survival)))
            return seen[-1][1]

    engine = as_new(lagged_engine)
    engine._policy = Seen(BLOCK)
    requests = random_requests(4, seed=4, verification="coupled")
    got = run_all(engine, requests)
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    for survival, chosen in seen:
        np.testing.assert_array_equal(chosen, admit_early_stop(survival, step_times(), 0.1))
    assert sum(int(chosen.sum()) for _, chosen in seen) >= sum(sum(g[2]) for g in got) > 0


def test_current_keeps_texts_and_falls_back_beside_a_sampled_request(lagged_engine: Engine, models: Models) -> None:
    engine = as_new(lagged_engine)
    for seed, fallen in ((5, False), (6, True)):
        engine._policy = Current(BLOCK)
        requests = random_requests(4, seed=seed, verification="coupled", max_new_tokens=12)
        sampled = [Request([1], 16, Sampling(1.0), 3, "rejection")] if fallen else []
        before = engine.counters()
        got = run_all(engine, requests[: 4 - fallen] + sampled)
        assert [g[0] for g in got[: 4 - fallen]] == [e[0] for e in expected(models, requests[: 4 - fallen])]
        change = difference(before, engine.counters())
        assert (change["fallback_cycles"] > 0) == fallen and change["offered"] > 0


def test_reports_and_counters_tell_the_same(lagged_engine: Engine, models: Models) -> None:
    """Drafts that were trimmed and then emitted are counted from the texts alone."""
    engine = as_new(lagged_engine)
    reports: list[Any] = []
    engine.watch(reports.append)
    before = engine.counters()
    requests = random_requests(9, seed=7)
    got = run_all(engine, requests)
    engine._reports.watchers.clear()
    change = difference(before, engine.counters())
    total = {name: sum(int(getattr(r, name).sum()) for r in reports) for name in ("drafted", "offered", "accepted")}
    assert total["offered"] == change["offered"] == sum(sum(g[2]) for g in got)
    assert total["accepted"] == change["accepted"] and sum(r.scheduled for r in reports) == change["scheduled"]
    assert total["drafted"] - total["offered"] == change["trimmed"] > 0
    assert sum(change["budgets"].values()) == sum(len(g[2]) for g in got)
    assert sum(int(drafts) * n for drafts, n in change["budgets"].items()) == change["offered"]
    assert [r.cycle for r in reports] == sorted({r.cycle for r in reports})
    assert 0 <= change["regretted"] <= change["trimmed"]
    for r in reports:
        wanted = step_times().ms(len(r.requests) + r.scheduled) + (0.1 if r.drafted.any() else 0.0)
        assert r.predicted_ms is not None and r.predicted_ms >= wanted - 1e-9  # a row may have ended meanwhile
    assert change["predicted_milliseconds"] > 0 and change["measured_milliseconds"] > 0


def test_regretted_drafts_are_those_the_text_repeats() -> None:
    """A tail of three behind two accepted drafts: the target's own token and the next cycle's first repeat it, the
    one after does not. A tail behind a rejected draft is not compared."""
    counters = Counters()
    reports = Reports(counters, 5)
    tenant = Tenant(1, Checked((1,), 20, Sampling(), None, False, ()), 0)
    decision = Decision(2, np.zeros(1, np.int32))
    plan = Plan(0, (tenant,), decision, 1, 16, 16)

    def cycle(drafts: list[int], emitted: list[int], accepted: int, offered: int) -> float:
        flight = Flight((tenant,), None, plan, tokens=jnp.array([drafts]))  # type: ignore[arg-type]
        out = Emitted(np.array([emitted]), *(np.array([n]) for n in (len(emitted), accepted, offered, 0, 0, 0)))
        tenant.tokens += emitted
        reports.regret(tenant, flight, out, 0)
        return counters.counts["regretted"]

    assert cycle([7, 8, 9, 10, 11], [7, 8, 9], accepted=2, offered=2) == 1  # 9
    assert cycle([10, 3, 3, 3, 3], [10, 12], accepted=1, offered=2) == 2  # 10; 11 is not 12, and no tail here
    assert tenant.trimmed == []
    assert cycle([5, 5, 5, 5, 5], [4], accepted=0, offered=0) == 2  # the first trimmed draft is wrong
    assert cycle([4, 4, 6, 6, 6], [4], accepted=0, offered=0) == 3
    assert cycle([4, 4, 6, 6, 6], [4, 4, 6], accepted=2, offered=3) == 4  # 4 of the block before, then 6 is not 4


def test_a_step_that_is_never_to_be_run_is_taken_by_no_probe(lagged_engine: Engine) -> None:
    """A table may say so by an infinite entry. Four requests skip more cycles than a probe waits for."""
    engine = as_new(lagged_engine)
    never = StepTimeTable([1, 2, 3, 4, 32], [1.0, 1e3, 1e6, 1e9, math.inf])
    engine._times = StepTimes(never, measured=False)
    before = engine.counters()
    got = run_all(engine, [Request([n], 16, Sampling(0.0)) for n in range(4)])
    change = difference(before, engine.counters())
    assert [len(tokens) for tokens, _, _ in got] == [16] * 4
    assert change["skipped_drafts"] > 4 * 8 and change["probes"] == change["drafted"] == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (StepTimeTable([1, 2], [1.0, 2.0]), "step_time: its last entry is 2 tokens, but 4 requests may run"),
        (StepTimeTable([2, 4, 32], [1.0, math.inf, 9.0]), "step_time: 4 requests may run, but some step without"),
        (7, "step_time must be a StepTimeTable or the path of one, found int"),
    ],
)
def test_a_table_that_does_not_serve_is_refused_at_start_up(table: Any, message: str, models: Models) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(*models, engine_config(mode="lagged", step_time=table))
