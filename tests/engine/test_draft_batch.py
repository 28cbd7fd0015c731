"""The draft batch: only the requests that get drafts are drafted for, in a program of their own number of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cycle
from dspark_jax.calibrate import Calibration, CalibrationTables
from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState
from dspark_jax.engine import Engine, Request, steps
from dspark_jax.engine.flight import Plan
from dspark_jax.engine.policy import OUTSIDE, Decision
from dspark_jax.engine.slots import Tenant
from dspark_jax.kv_cache import KVCache
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget, open_slots, tiny_drafter, tiny_target
from tests.engine.cases import BLOCK, Models, engine_config, step_times

SLOTS, DRAFTS, CONTEXT = 4, 3, 24


def opened(target: Any, drafter: Any) -> DecodeState:
    """Four requests with prompts of different lengths."""
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 5, (SLOTS, 9)), jnp.int32)
    lengths = jnp.asarray([9, 4, 6, 5], jnp.int32)
    seeds = jnp.arange(SLOTS, dtype=jnp.uint32)
    return open_slots(target, drafter, prompts, lengths=lengths, max_new_tokens=40, seeds=seeds)


def draft(
    drafter: Any, state: DecodeState, slots: list[int], least: list[int], base: Any, total: int, shift: Any = 0.0
) -> steps.Draft:
    program = partial(
        steps.draft,
        rows=len(slots),
        drafts=DRAFTS,
        context=CONTEXT,
        max_positions=99,
        rule="top_k",
        static=cycle.Static(),
    )
    numbers = jnp.int32(total), jnp.float32(0.0), jnp.ones((len(slots), DRAFTS)), jnp.full(len(slots), shift)
    rows = (jnp.asarray(a, jnp.int32) for a in (least, [DRAFTS] * len(slots), slots))
    return jax.jit(program)(drafter, state.replace(target=None), base, *numbers, *rows)


def test_a_shift_moves_the_confidences_of_its_own_row() -> None:
    """Survival of slot 3, row 1, is that of its logits plus 0.7; the drafts and slot 1 are as they were."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, block_size=DRAFTS, target_layer_ids=(0,))
    state = jax.jit(opened)(target, drafter)
    base = jnp.zeros((DRAFTS, SLOTS, 32), jnp.float32)
    want = draft(drafter, state, [1, 3], [0, 0], base, 4)
    got = draft(drafter, state, [1, 3], [0, 0], base, 4, shift=jnp.asarray([0.0, 0.7]))
    np.testing.assert_array_equal(got.proposal.tokens, want.proposal.tokens)
    np.testing.assert_array_equal(got.survival[1], want.survival[1])
    logits = np.asarray(want.proposal.confidence_logits)[3] + 0.7
    np.testing.assert_allclose(np.asarray(got.survival)[3], np.cumprod(1 / (1 + np.exp(-logits))), rtol=1e-5)


def test_every_request_is_scored_by_the_temperatures_and_the_shift_of_its_own_table(models: Models) -> None:
    """Mode threshold, with nothing verified: the same blocks whatever corrects their confidences. Those of a greedy,
    a coupled and a rejection request survive as the raw logits say, each moved and divided as its rule's table says."""
    rules = (("rejection", 0.0, 0.3), ("coupled", 1.0, -0.6), ("rejection", 1.0, None))
    temperatures = np.array([1.5, 0.7, 2.0])
    requests = [
        Request((1, 2, 3), 8, Sampling(0.0), 1),
        Request((2, 2, 1), 8, Sampling(0.7), 2, verification="coupled"),
        Request((2, 1), 8, Sampling(0.9), 3, verification="rejection"),
    ]

    def survivals(tables: list[Calibration]) -> list[np.ndarray]:
        config = engine_config(mode="threshold", calibration=CalibrationTables(tuple(tables)), confidence_threshold=1.0)
        engine, seen = Engine(*models, config), {}

        def watch(report: Any) -> None:
            if report.survival is not None:
                for row, request in enumerate(report.requests):
                    seen.setdefault(request, []).append(np.array(report.survival[row], np.float64))

        engine.watch(watch)
        ids = [engine.submit(request) for request in requests]
        engine.run()
        return [np.stack(seen[i]) for i in ids]

    raw = survivals([Calibration(np.ones(BLOCK), None, None, rule, t) for rule, t, _ in rules])
    got = survivals([Calibration(temperatures, None, None, rule, t, shift) for rule, t, shift in rules])
    for before, after, (_, _, shift) in zip(raw, got, rules, strict=True):
        assert before.shape == after.shape and len(before) >= 6
        known = before[(before > 0).all(axis=1)]
        p = known / np.concatenate([np.ones_like(known[:, :1]), known[:, :-1]], axis=1)
        logits = (np.log(p / (1 - p)) + (shift or 0.0)) / temperatures
        want = np.cumprod(1 / (1 + np.exp(-logits)), axis=1)
        np.testing.assert_allclose(after[(before > 0).all(axis=1)], want, rtol=1e-4)
        assert len(known) >= 4 and not np.allclose(want, known, rtol=0.02)


def test_drafting_for_some_slots_is_that_part_of_drafting_for_all() -> None:
    """Slots 1 and 3 of four, whose caches are read and whose places are written; 0 and 2 keep the logits they
    had, and have nothing admitted. What is admitted among the two is what is admitted where the others are outside."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, block_size=DRAFTS, target_layer_ids=(0,))
    state = jax.jit(opened)(target, drafter)
    poison = jnp.full((DRAFTS, SLOTS, 32), jnp.nan, jnp.float32)
    want = draft(drafter, state, [0, 1, 2, 3], [OUTSIDE, 0, OUTSIDE, 0], poison, 4)
    got = draft(drafter, state, [1, 3], [0, 0], poison, 4)
    inside, outside = np.array([1, 3]), np.array([0, 2])
    for name in ("tokens", "draft_index"):
        np.testing.assert_array_equal(getattr(got.proposal, name)[inside], getattr(want.proposal, name)[inside])
    np.testing.assert_allclose(got.proposal.log_q[inside], want.proposal.log_q[inside], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.proposal.base[:, inside], want.proposal.base[:, inside], rtol=1e-4, atol=1e-4)
    assert np.isnan(got.proposal.base[:, outside]).all()
    np.testing.assert_allclose(got.survival, want.survival, rtol=1e-4)
    assert got.admitted.tolist() == want.admitted.tolist() and int(got.admitted.sum()) == 4


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_the_rows_of_a_state_are_its_slots(stacked: bool) -> None:
    """Caches with the slot where each layout has it, cut behind the cells that are read; other arrays slots first."""
    cells = np.random.default_rng(1).normal(size=(2, SLOTS, 1, 10, 4))
    cache = KVCache(*(jnp.asarray(cells) if stacked else tuple(jnp.asarray(c) for c in cells) for _ in range(2)))
    at = jnp.arange(SLOTS)
    values = dict.fromkeys(DecodeState.__dataclass_fields__, at)
    state = DecodeState(**{**values, "draft": (cache, at), "target": None, "ring": None})
    got = steps._of_slots(state, jnp.asarray([0, 3]), 7)
    for layer, want in enumerate(cells):
        np.testing.assert_array_equal(got.draft[0].k[layer], want[[0, 3]][:, :, :7])
    assert got.draft[1].tolist() == [0, 3] and got.length.tolist() == [0, 3]


def test_a_draft_program_of_some_rows_writes_in_place() -> None:
    """The base logits of all slots are donated, and no copy of it is made."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, block_size=DRAFTS, target_layer_ids=(0,))
    config = engine_config(mode="lagged", slot_buckets=(1, 2, 4), step_time=step_times(), max_model_len=40)
    engine = Engine(target, drafter, config)
    key = next(key for key in engine.buckets.keys(39) if (key.kind, key.slots) == ("draft", 2))
    compiled = engine._programs._lower(key, engine._programs._example(key, engine._state)).compile()
    base = engine._programs._last_proposal(engine._state).base
    assert base.shape[1] == 4 and compiled.memory_analysis().alias_size_in_bytes >= base.nbytes
    shape = ",".join(map(str, base.shape))
    assert f"[{shape}]" in compiled.as_text() and f"[{shape}]{{2,1,0}} copy(" not in compiled.as_text()


def test_a_draft_program_is_filled_up_with_slots_that_get_no_draft() -> None:
    """Ascending, so that ties of survival go to the lower slot as everywhere."""
    tenants = tuple(Tenant(n, None, n) if n != 2 else None for n in range(6))  # type: ignore[arg-type]
    plan = Plan(0, tenants, Decision(2, np.array([OUTSIDE, 0, OUTSIDE, 1, 0])), 6, 16, 16)
    assert plan.draft_slots(3).tolist() == [1, 4, 5]
    assert plan.draft_slots(4).tolist() == [0, 1, 4, 5]
    assert plan.draft_slots(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_request_that_leaves_makes_the_draft_smaller() -> None:
    """Two requests: one writes 0 1 2 0 1 2 ..., drafted with a survival of 0.95; the other 3 4 5 3 4 5 ..., whose
    drafts are as good as refused. Both are drafted for until it has been so for eight cycles; from then on the draft
    runs in the program of one row, but for the probes. Its text does not notice, and neither does the other's."""
    following = np.array([1, 2, 0, 4, 5, 3])
    law = np.full((7, 6), -30.0)
    law[np.arange(6), following] = 0.0
    confidence = np.array([[3.0] * 3 + [-6.0] * 3 + [3.0]] * DRAFTS)
    target = ScriptedTarget(jnp.asarray(law), max_positions=96)
    drafter = ScriptedDrafter(jnp.asarray(np.tile(law, (DRAFTS, 1, 1))), jnp.asarray(confidence), vocab_size=6)
    config = engine_config(
        mode="lagged",
        max_num_seqs=2,
        max_model_len=96,
        slot_buckets=(1, 2),
        step_time=step_times(),
    )
    engine = Engine(target, drafter, config)
    seen: list[tuple[int, list[int]]] = []
    engine.watch(lambda report: seen.append((int(engine.counters()["draft_rows"]), report.drafted.tolist())))
    ids = [engine.submit(Request([start], 90, Sampling(0.0), 1)) for start in (0, 3)]
    while len(seen) < 21:  # the first would be done with its 90 tokens soon after
        engine.step()
    left = next(n for n, (_, drafted) in enumerate(seen) if drafted == [DRAFTS, 0])
    # When the report of cycle n comes, cycle n + 1 has been dispatched and counted.
    rows = np.diff([rows for rows, _ in seen])[:-1].tolist()
    assert rows == [1 if drafted == [DRAFTS, 0] else 2 for _, drafted in seen[2:]]
    assert left >= 8 and rows[: left - 2].count(1) == 0 and rows[left - 2 :].count(2) == 1  # that is a probe
    results = [next(t for t in engine._slots if t.id == i).tokens for i in ids]
    for tokens, first in zip(results, (1, 4), strict=True):
        assert tokens == [(first - first // 3 * 3 + n) % 3 + first // 3 * 3 for n in range(len(tokens))]
