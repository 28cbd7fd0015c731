"""A request may be taken off its slot at any time and goes on exactly where it was; prompts and decoding share one
budget of tokens; memory is counted in cached tokens; nothing is lost, answered twice or left waiting for ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.engine.estimates import LAG
from dspark_jax.engine.seeds import claim_seed
from tests.engine.cases import (
    BLOCK,
    VOCAB,
    WINDOW,
    Models,
    as_new,
    behind_draft,
    engine_config,
    expected,
    fresh,
    random_requests,
    run_all,
    step_times,
)

GREEDY = Sampling(0.0)
WIDTH = BLOCK + 1


@pytest.fixture
def lagged(lagged_engine: Engine, monkeypatch: Any) -> Engine:
    """The scheduler's engine, without requests and without what its policy has learned; it gets that back."""
    for name in ("_policy", "_times"):
        monkeypatch.setattr(lagged_engine, name, getattr(lagged_engine, name))
    return as_new(lagged_engine)


def preempted_at(engine: Engine, requests: list[Request], step: int, which: int) -> list[Any]:
    """Tokens, committed and offered of every request; one of them loses its slot before step ``step``."""
    ids = [engine.submit(request) for request in requests]
    results: dict[int, Any] = {}
    at = 0
    while engine.has_work():
        if at == step:
            engine.preempt(ids[which])
        for event in engine.step():
            if event.result is not None:
                assert event.id not in results
                results[event.id] = event.result
        at += 1
    return [(results[i].tokens, results[i].committed, results[i].offered) for i in ids]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_a_preemption_at_any_step_changes_nothing(fixed_engine: Engine, models: Models, overlap: bool) -> None:
    """Greedy, rejection and coupled requests side by side, each of them taken off its slot before every step in turn
    while it has one: in its prompt, behind its first token, in every cycle. All texts, and what was accepted and
    offered in every cycle, are those of ``generate``: the cycle number is kept, so rejection draws the same numbers.
    """
    engine = fresh(fixed_engine, overlap=overlap)
    requests = random_requests(3, seed=31, max_new_tokens=16)
    want = expected(models, requests)
    before = engine.counters()["preemptions"]
    for step in range(13):
        for which in range(3) if overlap else (step % 3,):
            assert preempted_at(engine, requests, step, which) == want
    assert engine.counters()["preemptions"] - before >= (12 if overlap else 4)  # the others had ended, or waited
    engine.overlap = True


@pytest.mark.parametrize("kind", ["chain", "transformer"])
def test_what_a_drafter_cached_is_there_again_after_a_preemption(
    chain_engine: Engine, tiny_engine: Engine, kind: str
) -> None:
    """Real attention over cells that were computed by cycles, and now by a prompt: acceptance shows what is missing.
    With prefixes reused and with the store emptied in between."""
    engine = fresh(chain_engine if kind == "chain" else tiny_engine)
    requests = [Request([1, 2, 3, 4, 5, 6] * 3, 24, Sampling(0.7), 9, "rejection"), Request([3, 1], 20, GREEDY)]
    want = run_all(engine, requests)
    for step in (3, 6, 9):
        assert preempted_at(engine, requests, step, 0) == want
        assert preempted_at(fresh(engine), requests, step, 0) == want


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_a_preemption_between_draft_and_verify_is_one_at_the_next_step(
    fixed: Engine, models: Models, monkeypatch: Any, overlap: bool
) -> None:
    """The cycle is finished and counted; and one that is cancelled there after it was asked to leave is just gone."""
    fixed.overlap = overlap
    requests = random_requests(4, seed=32, max_new_tokens=14)
    want = expected(models, requests)
    ids = [fixed.submit(request) for request in requests]

    def interrupt() -> None:
        fixed.preempt(ids[0])
        fixed.preempt(ids[3])
        fixed.cancel(ids[3])

    behind_draft(fixed, monkeypatch, 6, interrupt)
    results = fixed.run()
    for k in range(3):
        assert (results[ids[k]].tokens, results[ids[k]].committed, results[ids[k]].offered) == want[k]
    gone = results[ids[3]]
    assert gone.finish_reason == "cancelled" and gone.tokens == want[3][0][: len(gone.tokens)]
    assert fixed.counters()["running"] == fixed.counters()["waiting"] == 0 and not fixed._seeds._alive


def test_a_preempted_request_that_is_cancelled_while_it_waits_has_what_it_emitted(
    fixed: Engine, monkeypatch: Any
) -> None:
    one, other = Request([1, 2, 3], 20, GREEDY), Request([4, 5], 20, GREEDY)
    alone = run_all(fixed, [one])[0][0]
    ids = [fixed.submit(request) for request in (other, one, other)]
    for _ in range(5):
        fixed.step()
    fixed.preempt(ids[2])
    fixed.preempt(12345)
    fixed.step()
    assert [t.id for t in fixed._slots] == ids  # it came back at once: there is room
    monkeypatch.setattr(fixed, "cache_tokens", 0)
    fixed.step()
    assert [t.id for t in fixed._slots] == ids[:1] and [t.id for t in fixed._waiting] == ids[1:]
    fixed.preempt(ids[1])  # it has no slot: left alone
    fixed.cancel(ids[1])
    results = fixed.run()
    kept = results[ids[1]].tokens
    assert 0 < len(kept) < 20 and kept == alone[: len(kept)] and results[ids[1]].finish_reason == "cancelled"
    assert results[ids[0]].tokens == results[ids[2]].tokens


def test_under_a_scheduler_a_resumed_request_starts_from_the_prior_and_its_text_stays(
    lagged: Engine, models: Models
) -> None:
    """Greedy and coupled texts do not depend on how many drafts were verified."""
    engine = lagged
    requests = [r for r in random_requests(6, seed=35, max_new_tokens=16) if r.verification != "rejection"]
    want = [tokens for tokens, _, _ in expected(models, requests)]
    ids = [engine.submit(request) for request in requests]
    results: dict[int, Any] = {}
    for step in range(200):
        if step == 8:
            tenants = list(engine._slots)
            assert any(t.score is not None for t in tenants)
            for t in tenants:
                engine.preempt(t.id)
        for event in engine.step():
            results |= {event.id: event.result} if event.result else {}
        if step == 8:
            assert all(t.score is None for t in (*engine._slots, *engine._waiting))
        if not engine.has_work():
            break
    assert [results[i].tokens for i in ids] == want


def test_what_was_scored_before_a_preemption_is_not_believed_after_it(lagged: Engine) -> None:
    """One of two loses its slot and is back at once, while its last cycles' scores are not yet read: they serve the
    average, and it begins from the prior. Its first score is of a cycle that it was there again for."""
    engine = lagged
    one, _ = (engine.submit(Request([n], 24, GREEDY)) for n in (1, 2))
    for _ in range(6):
        engine.step()
    assert all(tenant.score is not None for tenant in engine._slots)
    engine.preempt(one)
    back = engine._cycle
    seen = []
    while engine.has_work():
        engine.step()
        seen += [t.score[0] for t in engine._slots if t.id == one and t.stays and t.score is not None]
    assert seen and min(seen) >= back


def test_an_engine_that_was_reset_learns_as_a_new_one(lagged: Engine) -> None:
    """The cycles of before are of no use to the new count: their scores are dropped, and newer ones are believed."""
    for _ in range(2):
        engine = fresh(lagged)
        engine.submit(Request([1], 20, GREEDY))
        for _ in range(7):
            engine.step()
        (tenant,) = engine._slots
        assert tenant.score is not None and tenant.score[0] == engine._cycle - 1 - LAG
        assert len(engine._policy._estimates._unread) <= LAG + 1


def test_numbers_are_not_given_away_while_their_owner_waits_or_his_rival_runs(lagged: Engine) -> None:
    """Three rejection requests with one seed: the first has ended when the third comes, the second was preempted."""
    engine = lagged
    short, long = (Request([1], n, Sampling(0.8), 5, "rejection") for n in (2, 20))
    first, second = engine.submit(short), engine.submit(long)
    while any(tenant.id == first for tenant in (*engine._slots, *engine._waiting)):
        engine.step()
    engine.preempt(second)
    engine.submit(long)
    engine.step()
    engine.step()
    own = claim_seed(5, {5})
    assert [tenant.seed for tenant in engine._slots] == [own, claim_seed(5, {5, own})]
    results = engine.run()
    assert len(results[second].tokens) == 20
    engine.submit(long)
    engine.step()
    assert [tenant.seed for tenant in engine._slots] == [5]


def test_the_youngest_makes_room_and_all_texts_are_the_same(fixed: Engine, models: Models, monkeypatch: Any) -> None:
    """Memory for less than two whole requests: they enter as long as there is room, grow, the last one leaves, and
    comes back before those who came after it. First tokens come in the order of arrival."""
    requests = random_requests(9, seed=33, max_new_tokens=16)
    want = expected(models, requests)
    monkeypatch.setattr(fixed, "cache_tokens", WINDOW + WIDTH)
    before = fixed.counters()
    ids = [fixed.submit(request) for request in requests]
    first: list[int] = []
    results: dict[int, Any] = {}
    while fixed.has_work():
        for event in fixed.step():
            first += [event.id] if event.tokens and event.id not in first else []
            assert event.id not in results
            results |= {event.id: event.result} if event.result else {}
        held = sum(t.known for t in fixed._slots)
        assert held <= fixed.cache_tokens
    assert first == ids
    assert [(results[i].tokens, results[i].committed, results[i].offered) for i in ids] == want
    assert fixed.counters()["preemptions"] > before["preemptions"]


def test_a_hole_that_nobody_has_memory_to_fill_is_closed(fixed: Engine, monkeypatch: Any) -> None:
    """Three short requests end before the fourth, and the fifth does not fit beside that one: it must wait for it, and
    the fourth moves to the lowest slot meanwhile, whose program is the smaller one."""
    monkeypatch.setattr(fixed, "cache_tokens", 40)
    for _ in range(3):
        fixed.submit(Request([1], 2, GREEDY))
    long, large = fixed.submit(Request([2], 20, GREEDY)), fixed.submit(Request([3] * 30, 4, GREEDY))
    while [tenant.id for tenant in fixed._slots] != [long]:
        fixed.step()
    fixed.step()
    assert [(tenant.id, tenant.slot) for tenant in fixed._slots] == [(long, 0)] and fixed._waiting
    results = fixed.run()
    assert len(results[long].tokens) == 20 and len(results[large].tokens) == 4


@pytest.mark.parametrize(("budget", "seeds"), [(None, [5, 5]), (9, [5, claim_seed(5, {5})])])
def test_equal_seeds_are_told_apart_where_fixed_blocks_share_a_step(
    budget: int | None, seeds: list[int], models: Models
) -> None:
    """With fewer tokens a step than whole blocks, the end of one request makes the other's blocks longer. What ended it
    were numbers of its seed, which therefore must not be the other's."""
    engine = Engine(*models, engine_config(max_num_batched_tokens=budget))
    for _ in range(2):
        engine.submit(Request([1], 20, Sampling(0.8), 5, "rejection"))
        tenant = engine._waiting.popleft()
        engine._slots.take(tenant)
        engine._welcome(tenant)
    assert [tenant.seed for tenant in engine._slots] == seeds


def test_memory_that_does_not_hold_one_request_is_refused(models: Models) -> None:
    with pytest.raises(ValueError, match="kv_cache_tokens: 48 tokens do not hold one request"):
        Engine(*models, engine_config(kv_cache_tokens=WINDOW))
    assert Engine(*models, engine_config(kv_cache_tokens=WINDOW + WIDTH)).cache_tokens == WINDOW + WIDTH


def test_those_who_decode_emit_in_every_step_of_a_long_prompt(fixed: Engine) -> None:
    """A prompt of 40 tokens comes while another request decodes: no step goes by without a token of that one, and
    the prompt is through after its five pieces of 8, whatever the budget."""
    for budget in (1, 12, 24, 1000):
        before, fixed.step_tokens = fixed.step_tokens, budget
        short = fixed.submit(Request([1], 30, GREEDY))
        fixed.step()
        long = fixed.submit(Request([2] * 40, 2, GREEDY))
        steps, seen = 0, False
        while not seen:
            emitted = {event.id for event in fixed.step() if event.tokens}
            steps, seen = steps + 1, long in emitted
            assert short in emitted
        fixed.run()
        fixed.reset()
        fixed.step_tokens = before
        assert steps == 5


def test_short_prompts_share_a_step(fixed: Engine, monkeypatch: Any) -> None:
    """Pieces of several prompts run in one step as long as they fit into its budget and into the largest piece."""
    monkeypatch.setattr(fixed, "buckets", dataclasses.replace(fixed.buckets, prefill=(8, 24)))
    for budget, together in ((1000, 3), (16, 2), (15, 1)):
        monkeypatch.setattr(fixed, "step_tokens", budget)
        ids = [fixed.submit(Request([1, 2], 3, GREEDY)) for _ in range(4)]
        fixed.step()
        assert len(fixed._slots) == together and fixed._pieces == [(8, 24)] * together
        assert set(fixed.run()) == set(ids)


def test_drafts_get_what_pieces_of_prompts_leave(lagged: Engine) -> None:
    """Requests that decode, their drafts and pieces of prompts: together never more than the budget, and never less
    than what keeps everybody going, a token each and the smallest piece."""
    engine = lagged
    before, engine.step_tokens = engine.step_tokens, 13
    rng = np.random.default_rng(1)
    drafted = []
    for _ in range(60):
        if rng.random() < 0.3:
            engine.submit(Request(rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist(), 12, GREEDY))
        start = engine.counters()
        engine.step()
        after = engine.counters()
        drafts, prompts = after["scheduled"] - start["scheduled"], sum(size for size, _ in engine._pieces)
        working = after["tokens_computed"] - after["padding_tokens"] - start["tokens_computed"]
        working += start["padding_tokens"] - drafts
        assert prompts in (0, 8) and working + drafts + prompts <= max(13, working + prompts)
        drafted.append(drafts)
    assert max(drafted) > 4 and engine.counters()["preemptions"] >= 0
    engine.run()
    engine.step_tokens = before


@pytest.mark.parametrize("mode", ["fixed", "threshold"])
def test_a_step_s_budget_shortens_blocks_of_every_mode(mode: str, fixed: Engine, models: Models) -> None:
    """Seven requests on four slots with 9 tokens a step, then with 2: requests, their drafts and pieces of prompts
    stay within it, but for a token each and the smallest piece; texts are those of any other lengths (greedy and
    `coupled`); no program is missing. A threshold of 0 is passed by every draft."""
    engine = fixed
    if mode == "threshold":
        engine = Engine(*models, engine_config(mode=mode, slot_buckets=(4,), token_buckets=(4, 8)))
        engine.warmup()
    requests = [r for r in random_requests(12, seed=9) if r.verification != "rejection"]
    before, late = engine.step_tokens, engine.counters()["late_compiles"]
    for budget in (9, 2):
        engine.step_tokens = budget
        ids, results, drafts = [engine.submit(request) for request in requests], {}, []
        while engine.has_work():
            start = engine.counters()
            results |= {event.id: event.result for event in engine.step() if event.result}
            change = {name: n - start[name] for name, n in engine.counters().items() if isinstance(n, int | float)}
            prompts = sum(size for size, _ in engine._pieces)
            working = change["tokens_computed"] - change["padding_tokens"] - change["scheduled"]
            assert working + change["scheduled"] + prompts <= max(budget, working + prompts)
            drafts.append(change["scheduled"] / max(working, 1))
        assert [results[i].tokens for i in ids] == [want[0] for want in expected(models, requests)]
        assert max(drafts) == (BLOCK if budget == 9 else 1) and 0 in drafts
    assert engine.counters()["late_compiles"] == late
    engine.step_tokens = before


def test_the_policy_is_told_what_pieces_of_prompts_take_of_a_step(lagged: Engine, monkeypatch: Any) -> None:
    """By the table of step times, in the steps that run them and in no other: two prompts of 20 tokens in pieces of 8
    beside a request that decodes."""
    told: list[tuple[float, float]] = []
    decide = lagged._policy.decide

    def listen(cycle: int, tenants: Any, costs: Any, beside: Any) -> Any:
        told.append((beside.other_ms, sum(lagged._times.piece_ms(*piece) for piece in lagged._pieces)))
        return decide(cycle, tenants, costs, beside)

    monkeypatch.setattr(lagged._policy, "decide", listen)
    lagged.submit(Request([1], 30, GREEDY))
    lagged.step()
    for _ in range(2):
        lagged.submit(Request([2] * 20, 4, GREEDY))
    lagged.run()
    piece = lagged._times.piece_ms(8, 64)
    assert piece == pytest.approx(step_times().ms(8)) and [was for was, _ in told] == [wanted for _, wanted in told]
    assert {round(was / piece) for was, _ in told} >= {0, 1} and sum(was for was, _ in told) >= 6 * piece


def test_nothing_is_lost_or_answered_twice_under_a_random_load(fixed: Engine, monkeypatch: Any) -> None:
    """Requests come, are cancelled and preempted, memory is short: every one ends once, those that were left alone with
    all their tokens, and the engine is empty afterwards."""
    monkeypatch.setattr(fixed, "cache_tokens", 2 * WINDOW)
    rng = np.random.default_rng(7)
    wanted: dict[int, int] = {}
    cancelled: set[int] = set()
    results: dict[int, Any] = {}
    for turn in range(400):
        if turn < 80 and rng.random() < 0.5:
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
            limit = int(rng.integers(1, 18))
            wanted[fixed.submit(Request(prompt, limit, Sampling(float(rng.choice([0.0, 0.8])))))] = limit
        if wanted and turn < 80 and rng.random() < 0.3:
            chosen = int(rng.choice(list(wanted)))
            if rng.random() < 0.4:
                cancelled |= {chosen} - set(results)
                fixed.cancel(chosen)
            else:
                fixed.preempt(chosen)
        for event in fixed.step():
            if event.result is not None:
                assert event.id not in results
                results[event.id] = event.result
        if turn >= 80 and not fixed.has_work():
            break
    assert set(results) == set(wanted) and not fixed.has_work()
    for i, result in results.items():
        assert result.finish_reason == ("cancelled" if i in cancelled else "length")
        assert len(result.tokens) == wanted[i] or i in cancelled
        assert sum(result.committed) == max(len(result.tokens) - 1, 0)
    counters = fixed.counters()
    assert counters["running"] == counters["waiting"] == 0 and counters["preemptions"] > 5
