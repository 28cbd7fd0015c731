"""A smoke test of the whole engine under load, mode by mode: 20,000 sampled continuations against the target's law.

The laws themselves are enumerated in the other files of this room; this one would notice a mistake in what lies between
them and the engine. Seeds are fixed, so the outcome is too. A sound engine with other seeds would give a p-value below
1e-4 in one of the five modes with a probability of 5e-4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.engine.adaptive import Current
from dspark_jax.engine.policy import Costs, Decision
from dspark_jax.engine.slots import Tenant
from dspark_jax.schedule import StepTimeTable
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget

V, DRAFTS, SLOTS = 3, 3, 16
CONTINUATIONS = 20_000
LEAST_P = 1e-4

P = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.2, 0.4], [0.6, 0.3, 0.1]])
"""The target's law behind each letter; the last row is never read, prompts have one letter at least."""
Q = np.array([[0.4, 0.2, 0.4], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])
C = np.array([0.95, 0.3, 0.6, 0.8])
"""Confidence behind each letter: what a block is believed to be worth depends on its own letters."""

SLOPE = StepTimeTable(tokens=range(1, 65), milliseconds=[1 + 0.1 * t for t in range(1, 65)], draft_ms=0.1)

DIP = StepTimeTable(tokens=[16, 64], milliseconds=[1.0, 2.0])
"""Verifying pays only where the survivals of the whole batch sum to more than 16; then all of it is verified."""


def models() -> tuple[ScriptedTarget, ScriptedDrafter]:
    return (
        ScriptedTarget(jnp.asarray(np.log(P)), max_positions=128),
        ScriptedDrafter(
            jnp.asarray(np.tile(np.log(Q), (DRAFTS, 1, 1))),
            jnp.asarray(np.tile(np.log(C / (1 - C)), (DRAFTS, 1))),
            vocab_size=V,
        ),
    )


class Unguarded(Current):
    """A request's block is verified where its own second draft looks likely: that looks past the first one. Every
    cycle drafts, so that there is something to look past."""

    def decide(self, cycle: int, tenants: Sequence[Tenant], costs: Costs | None, *beside: Any) -> Decision:
        decision = super().decide(cycle, tenants, costs, *beside)
        count = len(tenants)
        return dataclasses.replace(
            decision, drafts=DRAFTS * count, least=np.zeros(count, np.int32), probe=False, fallback=False
        )

    def lengths(
        self, tenants: Sequence[Tenant], decision: Decision, admitted: np.ndarray, survival: np.ndarray
    ) -> np.ndarray:
        return np.where(survival[:, 1] > 0.5, DRAFTS, 0).astype(np.int32)


def engine(mode: str, table: StepTimeTable = SLOPE, like: Engine | None = None) -> Engine:
    """An engine; ``like`` lends its compiled programs."""
    config = EngineConfig(
        max_num_seqs=SLOTS,
        max_model_len=128,
        mode=mode,
        prefill_buckets=(8,),
        slot_buckets=(SLOTS,),
        token_buckets=(32, 48),
        confidence_threshold=0.5,
        step_time=table,
        seed=1,
    )
    made = Engine(*models(), config)
    if like is not None:
        made._programs._table.update(like._programs._table)
    return made


def requests(**changes: Any) -> list[Request]:
    """Prompts of one to eight letters, texts of 21 to 81 tokens, more of them than are needed."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(CONTINUATIONS // 25 + 40):
        prompt, length = rng.integers(0, V, rng.integers(1, 9)).tolist(), 2 * int(rng.integers(10, 41)) + 1
        values: dict[str, Any] = {"seed": n, "verification": "rejection", **changes}
        found.append(Request(prompt, length, Sampling(1.0), **values))
    return found


def texts(made: Engine, wanted: Sequence[Request]) -> list[list[int]]:
    """By request. Sixteen are at work at any time, and one is cancelled now and then."""
    ids = [made.submit(request) for request in wanted]
    doomed = dataclasses.replace(wanted[0], max_new_tokens=90)
    victims, results, steps = [made.submit(doomed) for _ in range(40)], {}, 0
    while made.has_work():
        results |= {event.id: event.result for event in made.step() if event.result is not None}
        steps += 1
        if steps % 40 == 0 and victims:
            made.cancel(victims.pop())
    assert all(results[i].finish_reason == "length" for i in ids)
    return [results[i].tokens for i in ids]


def p_value(found: Sequence[Sequence[int]], wanted: int = CONTINUATIONS) -> float:
    """Of pairs of letters behind a letter: 3 x 9 cells, of which 3 x 8 are free."""
    counts = np.zeros((V, V, V))
    total = 0
    for text in found:
        for t in range(1, len(text) - 1, 2):
            if total < wanted:
                counts[text[t - 1], text[t], text[t + 1]] += 1
                total += 1
    assert total == wanted
    expected = counts.sum(axis=(1, 2), keepdims=True) * P[:V, :, None] * P[None, :V, :]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(jax.scipy.special.gammaincc(V * (V * V - 1) / 2.0, statistic / 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "threshold"])
def test_sampled_continuations_follow_the_target(mode: str, x64: None) -> None:
    made = engine(mode)
    assert p_value(texts(made, requests())) > LEAST_P
    counters = made.counters()
    assert len(counters["budgets"]) == 1 if mode == "fixed" else set(counters["budgets"]) == {"0", "1", "2", "3"}


@pytest.mark.slow
def test_sampled_continuations_follow_the_target_where_step_times_decide(x64: None) -> None:
    """Lagged, early stop, and current with coupled requests, whose texts are those of plain decoding letter for letter.
    A rule that looks past a draft, without that guard, is found out with a quarter of the numbers."""
    lagged = engine("lagged", DIP)
    for mode, table in (("lagged", DIP), ("early_stop", SLOPE)):
        made = lagged if mode == "lagged" else engine(mode, table, like=lagged)
        assert p_value(texts(made, requests())) > LEAST_P, mode
        assert 0 < made.counters()["offered"] < made.counters()["drafted"]

    wrong = engine("current", SLOPE, like=lagged)
    wrong._policy = Unguarded(DRAFTS)
    assert p_value(texts(wrong, requests()[:250]), 5000) < LEAST_P

    coupled = requests(verification="coupled")
    current = engine("current", DIP, like=lagged)
    found = texts(current, coupled)
    assert p_value(found) > LEAST_P and current.counters()["fallback_cycles"] == 0
    assert 0 < current.counters()["offered"] < current.counters()["drafted"]
    assert found[:150] == texts(engine("none"), coupled[:150])
