"""Requests come, wait, run, end and are cancelled; slots change hands; nothing is lost or answered twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from tests.engine.cases import (
    BLOCK,
    FORWARDS,
    VOCAB,
    WINDOW,
    Models,
    behind_draft,
    engine_config,
    expected,
    random_requests,
    run_all,
)

GREEDY = Sampling(temperature=0.0)


def test_events_add_up_to_the_result(fixed: Engine) -> None:
    """Every token is reported once, in order; the last event says why it ended and carries the whole."""
    requests = random_requests(7, seed=1)
    ids = [fixed.submit(request) for request in requests]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    ended: dict[int, Any] = {}
    while fixed.has_work():
        for event in fixed.step():
            assert event.id not in ended
            tokens[event.id] += event.tokens
            if event.finished:
                ended[event.id] = event
    assert fixed.step() == []
    for i, request in zip(ids, requests, strict=True):
        result = ended[i].result
        assert tokens[i] == result.tokens and len(tokens[i]) == request.max_new_tokens
        assert 1 + sum(result.committed) == len(result.tokens) and ended[i].finish_reason == "length"


def test_waiting_requests_enter_in_their_order(fixed: Engine) -> None:
    ids = [fixed.submit(Request([1, 2], 6, GREEDY)) for _ in range(9)]
    first_seen: list[int] = []
    while fixed.has_work():
        first_seen += [event.id for event in fixed.step() if event.id not in first_seen]
        assert fixed.counters()["running"] <= 4
    assert first_seen == ids


def test_decoding_goes_on_between_the_pieces_of_a_long_prompt(fixed: Engine) -> None:
    short = fixed.submit(Request([1], 12, GREEDY))
    fixed.step()
    long = fixed.submit(Request([2] * 30, 2, GREEDY))
    order = []
    while fixed.has_work():
        order += [event.id for event in fixed.step() if event.tokens]
    assert order[:2] == [short, short] and long in order


def test_a_stop_token_is_the_last_one(fixed: Engine, models: Models) -> None:
    """As its own prefix would be without a stop token; lengths as ``generate`` counts them."""
    stops = (3, 5)
    requests = random_requests(6, seed=6, max_new_tokens=16, stop_token_ids=stops)
    want = expected(models, requests, stop_token_ids=stops)
    got = run_all(fixed, requests)
    for (tokens, committed, offered), (whole, kept, drafts) in zip(got, want, strict=True):
        assert tokens == [t for t in whole if t >= 0]
        assert (committed, offered) == (kept, drafts)
    assert any(tokens[-1] in stops for tokens, _, _ in got)


def test_the_reason_of_an_end_is_told_apart(fixed: Engine) -> None:
    (tokens, _, _) = run_all(fixed, [Request([1, 2], 10, GREEDY)])[0]
    first = tokens[4]
    at = tokens.index(first)
    i = fixed.submit(Request([1, 2], 10, GREEDY, stop_token_ids=(first,)))
    j = fixed.submit(Request([1, 2], at + 1, GREEDY, stop_token_ids=(VOCAB + 5,)))
    results = fixed.run()
    assert results[i].tokens == results[j].tokens == tokens[: at + 1]
    assert (results[i].finish_reason, results[j].finish_reason) == ("stop", "length")


def test_the_first_token_may_be_the_last(fixed: Engine) -> None:
    one = fixed.submit(Request([1, 2], 1, GREEDY))
    token = fixed.run()[one].tokens[0]
    stopped = fixed.submit(Request([1, 2], 5, GREEDY, stop_token_ids=(token,)))
    result = fixed.run()[stopped]
    assert result.tokens == [token] and result.committed == [] and result.finish_reason == "stop"


def test_a_request_is_cut_at_the_end_of_the_window(fixed: Engine) -> None:
    """prompt + new tokens = window, whatever was asked; a mate goes on unharmed."""
    for length in (1, 20, WINDOW - 1):
        long, mate = Request([1] * length, 1000, GREEDY), Request([2, 3], 12, GREEDY)
        alone = run_all(fixed, [mate])[0]
        got = run_all(fixed, [long, mate])
        assert len(got[0][0]) == WINDOW - length and got[1] == alone


def test_a_block_shrinks_at_the_end_of_the_target_s_window(fixed: Engine) -> None:
    """And nowhere else: position + drafts stay below the window."""
    (tokens, committed, offered) = run_all(fixed, [Request([1] * 10, 1000, GREEDY)])[0]
    length = 10
    for count, drafts in zip(committed, offered, strict=True):
        assert drafts == min(BLOCK, WINDOW - 1 - length)
        length += count
    assert length == WINDOW - 1 and offered[-1] < BLOCK


def test_the_window_is_the_smaller_of_the_engine_s_and_the_target_s(models: Models) -> None:
    """A smaller one of the engine only cuts; a larger one is cut itself, and that is said."""
    engine = Engine(*models, engine_config(max_model_len=2048))
    assert engine.window == WINDOW and any(str(WINDOW) in note for note in engine.notes)
    engine = Engine(*models, engine_config(max_model_len=20))
    assert engine.window == 20 and engine.notes == []
    with pytest.raises(ValueError, match="prompt_ids: 20 tokens"):
        engine.submit(Request([1] * 20, 1))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_a_moved_tenant_goes_on_as_if_nothing_had_happened(fixed: Engine, overlap: bool) -> None:
    """The first request ends early; the second then moves down into the one-slot programs."""
    fixed.overlap = overlap
    short, long = Request([1, 2, 3], 12, GREEDY), Request([4] * 9, 30, Sampling(0.8), 7, "rejection")
    alone = run_all(fixed, [long])[0]
    moves = fixed.counters()["moves"]
    assert run_all(fixed, [short, long])[1] == alone
    assert fixed.counters()["moves"] == moves + 1


def test_cancelling_frees_the_slot_and_disturbs_nobody(fixed: Engine) -> None:
    requests = random_requests(6, seed=8, max_new_tokens=14)
    alone = [run_all(fixed, [request])[0] for request in requests]
    ids = [fixed.submit(request) for request in requests]
    fixed.cancel(ids[5])  # waiting
    fixed.cancel(12345)  # unknown
    events = [fixed.step() for _ in range(6)]
    fixed.cancel(ids[1])  # running
    fixed.cancel(ids[1])
    seen = [event for step in events for event in step]
    results = {event.id: event.result for event in seen if event.result is not None} | fixed.run()
    fixed.cancel(ids[0])  # ended
    assert set(results) == set(ids) and not fixed.has_work()
    assert results[ids[5]].finish_reason == results[ids[1]].finish_reason == "cancelled"
    assert results[ids[1]].tokens == alone[1][0][: len(results[ids[1]].tokens)]
    for k in (0, 2, 3, 4):
        assert results[ids[k]].tokens == alone[k][0]
    assert fixed.counters()["running"] == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_cancelling_between_draft_and_verify_disturbs_nobody(fixed: Engine, monkeypatch: Any, overlap: bool) -> None:
    """The cycle runs on for it, nothing of that is kept, its slot is free at the next step; no counter goes back."""
    fixed.overlap = overlap
    requests = random_requests(4, seed=9, max_new_tokens=14)
    alone = [run_all(fixed, [request])[0] for request in requests]
    ids = [fixed.submit(request) for request in requests]
    behind_draft(fixed, monkeypatch, 6, lambda: fixed.cancel(ids[2]))
    before, results = fixed.counters(), fixed.run()
    after = fixed.counters()
    assert results[ids[2]].finish_reason == "cancelled"
    kept = results[ids[2]].tokens
    assert 0 < len(kept) < 14 and kept == alone[2][0][: len(kept)]
    for k in (0, 1, 3):
        assert (results[ids[k]].tokens, results[ids[k]].committed, results[ids[k]].offered) == alone[k]
    assert all(after[name] >= before[name] for name in before if isinstance(before[name], int) and name != "waiting")
    assert after["running"] == after["waiting"] == 0


def test_cancelling_in_the_middle_of_a_prompt(fixed: Engine) -> None:
    request = Request([3, 1], 8, GREEDY)
    alone = run_all(fixed, [request])[0]
    long = fixed.submit(Request([1] * 40, 5, GREEDY))
    fixed.step()
    fixed.cancel(long)
    assert run_all(fixed, [request])[0] == alone


def test_a_failed_step_says_so_until_reset(fixed: Engine, monkeypatch: Any) -> None:
    """The state was donated: nothing in the engine can be trusted any more, so it refuses to go on."""
    request = Request([1, 2], 6, GREEDY)
    alone = run_all(fixed, [request])[0]
    fixed.submit(request)
    fixed.step()

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(fixed._programs, "verify", fail)
        with pytest.raises(MemoryError):
            fixed.step()
    with pytest.raises(RuntimeError, match="reset"):
        fixed.step()
    fixed.reset()
    assert not fixed.has_work()
    assert run_all(fixed, [request])[0] == alone


def test_the_verify_forward_really_shrinks(fixed: Engine) -> None:
    """The flat tokens that reach the target are those the counter says, and fewer where fewer requests run."""
    fixed.warmup()
    assert set(FORWARDS) == {8, BLOCK + 1, 4 * (BLOCK + 1)}  # pieces of prompts; one slot; four
    for count in (1, 4):
        before = fixed.counters()
        run_all(fixed, [Request([1], 12, GREEDY)] * count)
        after = fixed.counters()
        cycles = after["cycles"] - before["cycles"]
        computed, padding = (after[n] - before[n] for n in ("tokens_computed", "padding_tokens"))
        assert 0 < computed <= cycles * (BLOCK + 1) * count and padding < computed


def test_whole_blocks_are_reported_as_drafted_though_nobody_asks_for_their_scores(fixed: Engine) -> None:
    reports: list[Any] = []
    fixed.watch(reports.append)
    before = fixed.counters()["trimmed"]
    run_all(fixed, [Request([n] * 30, 18, GREEDY) for n in range(5)])  # up to the end of the window
    fixed._reports.watchers.clear()
    assert reports and all(r.survival is None and (r.drafted == BLOCK).all() for r in reports)
    trimmed = fixed.counters()["trimmed"] - before
    assert trimmed == sum(int((r.drafted - r.offered).sum()) for r in reports) > 0


def test_requests_without_a_seed_differ_and_follow_the_engine_s_seed(models: Models, fixed: Engine) -> None:
    """Fresh seeds: two runs of one prompt differ; an engine with the same seed repeats itself."""
    request = Request([1, 2, 3], 16, Sampling(1.0))
    fixed._fresh_seeds = np.random.default_rng(11)
    first = [fixed.submit(request) for _ in range(2)]
    once = fixed.run()
    fixed._fresh_seeds = np.random.default_rng(11)
    second = [fixed.submit(request) for _ in range(2)]
    again = fixed.run()
    assert once[first[0]].tokens != once[first[1]].tokens
    assert [once[i].tokens for i in first] == [again[i].tokens for i in second]
