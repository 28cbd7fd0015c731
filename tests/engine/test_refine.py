"""Verify sizes chosen by step times: where they pay, within the budget, and the same at the next start."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.engine.buckets import Buckets, Key, plan_buckets
from dspark_jax.engine.profile import profile
from dspark_jax.engine.refine import _value, refine, sizes_of
from dspark_jax.schedule import StepTimeTable
from tests.engine.cases import Models, engine_config

WINDOW = 2048


def planned(budget: int = 24, **config: Any) -> Buckets:
    return plan_buckets(
        EngineConfig(**config), window=WINDOW, drafts=7, variable=True, skips=True, budget=budget, spend=False
    )


def flat_to(last: int, price: float) -> Any:
    """Steps cost 10 ms up to ``last`` tokens, and ``price`` a token more beyond."""
    return lambda slots, tokens: 10.0 + price * max(tokens - last, 0)


def test_a_size_goes_where_drafts_pay() -> None:
    """Up to eight tokens cost the same: whole blocks of one request are free, and so are two tokens each of four. More
    cost as much as a step each: nothing for eight slots."""
    base = planned()
    found = refine(base, flat_to(8, 10.0), lambda slots: 1.0, 30, WINDOW)
    assert found.tokens[1][-1] == 8 and found.tokens[8] == base.tokens[8]
    assert 8 in found.tokens[4] and max(found.tokens[4]) == max(base.tokens[4])
    assert len(found.keys(WINDOW - 1)) <= 30
    assert refine(base, flat_to(64, 0.0), lambda slots: 1e6, 40, WINDOW) == base  # no draft ever pays


def test_no_size_is_added_that_a_step_cannot_fill() -> None:
    found = refine(planned(), flat_to(64, 0.0), lambda slots: 1.0, 40, WINDOW, most_tokens=20)
    assert (
        found != planned()
        and max(max(set(found.tokens[s]) - set(planned().tokens[s]), default=0) for s in (4, 8)) == 20
    )


@pytest.mark.parametrize("budget", [1, 22, 23, 24, 26, 40])
def test_the_budget_holds(budget: int) -> None:
    """A size costs a program for every context; the planned programs are there in any case."""
    base = planned()
    found = refine(base, flat_to(0, 0.3), lambda slots: 1.0, budget, WINDOW)
    assert len(found.keys(WINDOW - 1)) <= max(budget, len(base.keys(WINDOW - 1)))
    assert all(set(base.tokens[slots]) <= set(found.tokens[slots]) for slots in base.slots)
    assert (found != base) == (budget >= len(base.keys(WINDOW - 1)) + 2)


def test_the_first_choice_is_the_best_of_all() -> None:
    """Against trying every size of every slot bucket."""
    base, step_ms, draft_ms = planned(), flat_to(3, 1.5), lambda slots: 2.0 * slots  # room for one size
    (before, after) = (sizes.tokens for sizes in (base, refine(base, step_ms, draft_ms, 24, WINDOW)))
    fewest = {1: 1, 4: 2, 8: 5}

    def gain(slots: int, size: int) -> float:
        sizes = before[slots], (*before[slots], size)
        values = [_value(each, fewest[slots], slots, 7, step_ms, draft_ms) for each in sizes]
        return values[1] - values[0]

    best = max(gain(slots, size) for slots in base.slots for size in range(slots + 1, 8 * slots + 1))
    ((slots, size),) = [(s, t) for s in base.slots for t in set(after[s]) - set(before[s])]
    assert gain(slots, size) == pytest.approx(best, rel=0.05)  # of 24 sizes, not of all


def test_a_size_s_worth_by_hand() -> None:
    """One request, two drafts, survivals a and a^2; 10 ms, 11 for two tokens, 12 for three, 1 for the draft. Two drafts
    always pay: (1 + a + a^2) / 13 is above (1 + a) / 12 and 1 / 10."""
    ms = {1: 10.0, 2: 11.0, 3: 12.0}
    got = _value((2, 3), 1, 1, 2, lambda slots, tokens: ms[tokens], lambda slots: 1.0)
    assert got == pytest.approx(np.mean([math.log((1 + a + a * a) / 13) for a in (0.45, 0.6, 0.75, 0.9)]))


def test_what_nobody_measured_is_not_free() -> None:
    """Programs for one slot up to 4 tokens and for eight up to 24 are measured: 40 tokens are taken to cost at least
    40 / 24 of what 24 do."""
    buckets = planned()
    found = profile(lambda key: 0.01, buckets, WINDOW - 1, {}, clock=lambda: 0.0)
    assert found.step_ms(8, 24) == pytest.approx(10.0) and found.step_ms(8, 8) == pytest.approx(10.0)
    assert found.step_ms(8, 48) == pytest.approx(20.0) and found.draft_ms(8) == pytest.approx(10.0)


def test_a_given_table_chooses_the_sizes(models: Models) -> None:
    """Free up to four tokens, dear beyond: one request gets its whole block of three drafts, four get none. Sizes named
    by the caller stay."""
    table = StepTimeTable(tokens=[1, 2, 3, 4, 16], milliseconds=[1.0, 1.0, 1.0, 1.0, 99.0])
    planned = Engine(*models, engine_config(mode="lagged", step_time=table)).buckets
    found = Engine(*models, engine_config(mode="lagged", step_time=table, max_programs=40)).buckets
    assert 4 not in planned.tokens[1] and 4 in found.tokens[1] and found.tokens[4] == planned.tokens[4]
    named = engine_config(mode="lagged", step_time=table, max_programs=40, token_buckets=(8,))
    assert Engine(*models, named).buckets.tokens == {1: (4,), 4: (8, 16)}


def test_a_start_compiles_and_measures_what_it_chose_and_the_next_one_finds_it(
    models: Models, monkeypatch: Any, tmp_path: Path
) -> None:
    """With a machine on which a token more costs little: whole blocks pay. Nothing is compiled after that."""
    compiled: list[Key] = []

    def start() -> Engine:
        config = engine_config(mode="lagged", max_programs=24, profile_dir=str(tmp_path), profile_seconds=1.0)
        engine = Engine(*models, config)

        def compile_all(keys: Any, state: Any, progress: Any) -> Any:
            compiled.extend(key for key in keys if key not in compiled)
            return state

        def rehearse(key: Key, state: Any) -> tuple[Any, float]:
            assert key in compiled
            tokens = 0 if key.kind == "draft" else key.tokens
            return state, 1e-3 * (1 + 0.02 * tokens)

        monkeypatch.setattr(engine._programs, "compile_all", compile_all)
        monkeypatch.setattr(engine._programs, "rehearse", rehearse)
        engine.warmup()
        assert engine._programs.buckets is engine.buckets is engine._drift.buckets
        return engine

    first = start()
    assert 4 in first.buckets.tokens[1] and first.buckets != first._planned
    rows = {row.slots: tuple(row.tokens.tolist()[1:]) for row in first._times.table.rows}  # type: ignore[union-attr]
    assert rows == first.buckets.tokens
    assert set(first.buckets.keys(first.window - 1)) == set(compiled)
    compiled.clear()
    second = start()
    assert second.buckets == first.buckets and set(compiled) == set(second.buckets.keys(second.window - 1))
    assert len(list(tmp_path.iterdir())) == 1
    again = sizes_of(first._times.table, dataclasses.replace(first._planned))  # type: ignore[union-attr]
    assert again == first.buckets
