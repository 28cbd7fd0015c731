"""A beginning that is known costs no second prefill, and everything is as the first time: text, accepted lengths, what
the caches hold. An engine that was just made empty is the reference: it has nothing to reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.engine.prefix_cache import BLOCK
from dspark_jax.engine.step_times import StepTimes
from tests.engine.cases import VOCAB, Models, engine_config, fresh, run_all, step_times

KINDS: tuple[dict[str, Any], ...] = (
    {"sampling": Sampling(0.0)},
    {"sampling": Sampling(0.8), "seed": 3, "verification": "coupled"},
    {"sampling": Sampling(0.8), "seed": 4, "verification": "rejection"},
)


def counted(engine: Engine, run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What ``run`` returns, and what it added to the counters."""
    before = engine.counters()
    result = run()
    after = engine.counters()
    return result, {name: after[name] - before[name] for name in before if isinstance(before[name], int | float)}


def as_the_first_time(engine: Engine, requests: Sequence[Request]) -> int:
    """Each request alone in an empty engine, then alone and all together where the others' texts are known. Returns
    the prompt tokens that were found."""
    alone = [run_all(fresh(engine), [request])[0] for request in requests]
    fresh(engine)
    hits = 0
    for request, want in zip(requests, alone, strict=True):
        (got,), added = counted(engine, lambda request=request: run_all(engine, [request]))
        assert got == want
        assert added["prefix_cache_queries"] == len(request.prompt_ids)
        assert added["prompt_tokens"] <= len(request.prompt_ids) - added["prefix_cache_hits"] + engine._lookback
        hits += added["prefix_cache_hits"]
    assert run_all(engine, requests) == alone
    return int(hits)


def prompts(vocabulary: int, length: int, part: Sequence[int]) -> list[list[int]]:
    """One prompt, again, and again with another token at the places ``part``."""
    rng = np.random.default_rng(2)
    one = rng.integers(0, vocabulary, length).tolist()
    return [one, one, *([*one[:at], (one[at] + 1) % vocabulary, *one[at + 1 :]] for at in part)]


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "coupled", "rejection"])
def test_a_known_prompt_gives_the_same_text_and_the_same_acceptance(tiny_engine: Engine, kind: dict[str, Any]) -> None:
    """Prompts of 34 tokens: two blocks are found again, one of them where the prompt parts in the middle of the
    second, none where it parts in the first."""
    requests = [Request(prompt, 12, **kind) for prompt in prompts(31, 34, (17, 3))]
    assert as_the_first_time(tiny_engine, requests) == (0 + 2 + 1 + 0) * BLOCK


def test_an_answer_is_known_to_the_next_turn_of_a_conversation(tiny_engine: Engine) -> None:
    """Cells that verification wrote are as good as those of a prompt. Of the last cycle nothing is kept."""
    engine = fresh(tiny_engine)
    first = Request(list(range(10)), 20, Sampling(0.7), 5)
    ((answer, committed, _),) = run_all(engine, [first])
    second = Request([*first.prompt_ids, *answer, 1, 2, 3], 12, Sampling(0.7), 6)
    got, added = counted(engine, lambda: run_all(engine, [second]))
    assert added["prefix_cache_hits"] == (10 + 20 - 1 - committed[-1]) // BLOCK * BLOCK == BLOCK
    assert got == run_all(fresh(engine), [second])


def test_a_chain_goes_on_from_a_known_prefix(chain_engine: Engine) -> None:
    """Its cells too are those of the first time, the one whose partner must be looked back on included; and the
    prompt that ends with a block has its last block computed, since somebody must say what comes next."""
    lists = prompts(VOCAB, 35, (17, 33)) + prompts(VOCAB, 32, ())
    for kind in KINDS:
        requests = [Request(prompt, 8, **kind) for prompt in lists]
        assert as_the_first_time(chain_engine, requests) == (0 + 2 + 1 + 2 + 1 + 1) * BLOCK
    cells = []
    for times in (1, 2):
        engine = fresh(chain_engine)
        for _ in range(times):
            run_all(engine, requests[:1])
        cells.append(np.asarray(engine._state.draft.cache.k[0])[0, :, 1:34])
    np.testing.assert_allclose(cells[1], cells[0], rtol=1e-9)


def true_store(engine: Engine) -> int:
    """Scripted models cache token ids: every block that is known must hold its own text, in both caches. Returns the
    number of blocks."""
    engine._confirm()
    store = engine._programs._store
    assert store is not None
    for block in engine._prefixes._used:
        assert np.asarray(store.target)[block.row].tolist() == list(block.tokens)
        assert np.asarray(store.draft)[block.row].tolist() == list(block.tokens)
    return len(engine._prefixes)


@pytest.mark.parametrize("mode", ["fixed", "lagged", "skipping"])
def test_what_is_kept_is_what_it_is_kept_for_under_a_random_load(
    fixed_engine: Engine, lagged_engine: Engine, monkeypatch: Any, mode: str
) -> None:
    """Requests enter, move, are cancelled and preempted, blocks are thrown out, the drafter lags behind where drafts
    never pay: whatever is in the store at any moment is the text it stands for, for the target and for the drafter."""
    engine = fresh(fixed_engine if mode == "fixed" else lagged_engine)
    if mode == "skipping":
        monkeypatch.setattr(engine, "_times", StepTimes(step_times(slope=50.0), measured=False))
    rng = np.random.default_rng(4)
    beginnings = [rng.integers(0, VOCAB, 33).tolist() for _ in range(2)]
    ids: list[int] = []
    blocks = 0
    before = engine.counters()
    for _ in range(50):
        if rng.random() < 0.5:
            prompt = beginnings[int(rng.integers(2))][: int(rng.integers(1, 34))]
            sampling = Sampling(float(rng.choice([0.0, 0.8])))
            ids.append(engine.submit(Request(prompt, int(rng.integers(1, 20)), sampling)))
        if ids and rng.random() < 0.2:
            (engine.cancel if rng.random() < 0.5 else engine.preempt)(int(rng.choice(ids)))
        engine.step()
        blocks = max(blocks, true_store(engine))
    engine.run()
    after = engine.counters()
    assert blocks == engine.buckets.stored_blocks == 3  # and more than three texts
    assert after["prefix_cache_hits"] > before["prefix_cache_hits"] and after["prefix_cache_refused"] == 0
    assert after["late_compiles"] == 0


def test_numbers_that_are_not_finite_never_reach_the_store(tiny_engine: Engine) -> None:
    """The drafter's context of one token is NaN: the request itself goes on, the blocks from that token on are not
    kept, and the next one with the same beginning computes them anew."""
    engine = fresh(tiny_engine)
    first = Request(list(range(18)), 22, Sampling(0.0))
    healthy = run_all(engine, [first])
    fresh(engine).submit(first)
    while not any(tenant.decoding for tenant in engine._slots):
        engine.step()
    cache = engine._state.draft.cache
    spoiled = cache.replace(k=tuple(cells.at[0, :, BLOCK + 1].set(jnp.nan) for cells in cache.k))
    engine._state = engine._state.replace(draft=engine._state.draft.replace(cache=spoiled))
    (result,) = engine.run().values()
    assert result.tokens == healthy[0][0] and result.committed != healthy[0][1]
    again = engine.submit(Request([*first.prompt_ids, *result.tokens], 6, Sampling(0.0)))
    assert engine.run()[again].cached_tokens == BLOCK
    assert engine.counters()["prefix_cache_refused"] == (18 + 22 - 1 - result.committed[-1]) // BLOCK - 1 > 0


def test_prefix_caching_can_be_turned_off(models: Models) -> None:
    """Then there is no store, nothing is looked up, and a repeated prompt is computed again."""
    engine = Engine(*models, engine_config(enable_prefix_caching=False, mode="none", slot_buckets=(4,)))
    assert engine._programs._store is None and "copy" not in {key.kind for key in engine.buckets.keys(47)}
    request = Request([1, 2, 3, 4, 5, 6] * 5, 4, Sampling(0.0))
    first = run_all(engine, [request])
    assert run_all(engine, [request]) == first
    counters = engine.counters()
    assert counters["prefix_cache_queries"] == counters["prefix_cache_hits"] == 0 and counters["prompt_tokens"] == 60
    with pytest.raises(ValueError, match="enable_prefix_caching must be True or False"):
        engine_config(enable_prefix_caching="no")


def test_the_result_says_how_much_was_found(fixed: Engine) -> None:
    """Of the first admission alone; an event says it as soon as there is one."""
    request = Request([1, 2, 3, 4] * 9, 4, Sampling(0.0))
    for want in (0, 2 * BLOCK):
        one = fixed.submit(request)
        events = [event for _ in range(12) for event in fixed.step()]
        assert {event.cached_tokens for event in events} == {want}
        assert [event.result.cached_tokens for event in events if event.result] == [want] and events[0].id == one
