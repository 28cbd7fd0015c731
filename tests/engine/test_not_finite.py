"""A model that computes NaN: the request that meets it ends with what it has; its mates and the next ones go on."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.testing import tiny_drafter, tiny_target
from tests.engine.cases import (
    VOCAB,
    Models,
    engine_config,
    expected,
    fresh,
    random_requests,
    run_all,
    step_times,
)

BAD = 4
"""After this token the spoiled target's logits are NaN."""


def until_bad(tokens: list[int], prompt: list[int]) -> list[int]:
    """What can be emitted: everything up to the first BAD token, that included; nothing if the prompt ends in one."""
    if prompt[-1] == BAD:
        return []
    return tokens[: tokens.index(BAD) + 1] if BAD in tokens else tokens


@pytest.mark.parametrize("mode", ["fixed", "none"])
def test_a_request_ends_before_the_token_whose_logits_are_nan(models: Models, mode: str) -> None:
    """All rules and temperatures, in the middle of blocks and at the first token; texts are those of the healthy
    model up to there, also of the requests that use the same slots afterwards."""
    target, drafter = models
    last = np.arange(target.table.shape[0]) % (VOCAB + 1)  # of the tokens that a row of the table is for
    spoiled = target.replace(table=jnp.where(jnp.asarray(last == BAD)[:, None], jnp.nan, target.table))
    engine = Engine(spoiled, drafter, engine_config(mode=mode, max_num_seqs=3, slot_buckets=(3,)))
    rule = {} if mode == "fixed" else {"verification": "coupled"}
    requests = random_requests(15, seed=12, max_new_tokens=12, **rule)
    ids = [engine.submit(request) for request in requests]
    results = engine.run()
    ends = []
    for i, request, (whole, _, _) in zip(ids, requests, expected(models, requests), strict=True):
        result, prompt = results[i], list(request.prompt_ids)
        want = until_bad(whole, prompt)
        ends.append((len(want), result.finish_reason))
        assert result.tokens == want
        assert result.finish_reason == ("length" if len(want) == 12 else "error")
        assert sum(result.committed) == max(len(want) - 1, 0) and 0 not in result.committed
    assert {"length", "error"} == {reason for _, reason in ends} and min(ends)[0] == 0
    counters = engine.counters()
    assert counters["failed"] == sum(reason == "error" for _, reason in ends) and counters["running"] == 0


def test_the_next_request_in_the_slot_of_a_nan_is_as_good_as_new() -> None:
    """A transformer in float64 with one NaN embedding, a single slot: its cells held NaN of one request and are read,
    masked, by the next one."""
    healthy = tiny_target(dtype=jnp.float64, num_layers=1)
    drafter = tiny_drafter(healthy, block_size=2, target_layer_ids=(0,))
    poison = healthy.config.vocab_size - 2
    table = healthy.params["embed_tokens"].at[poison].set(jnp.nan)
    target = healthy.replace(params={**healthy.params, "embed_tokens": table})
    drafter = drafter.replace(shared=drafter.shared.replace(embed=table))
    engine = Engine(target, drafter, engine_config(max_num_seqs=1, slot_buckets=(1,)))
    good = Request([1, 2, 3], 12, Sampling(0.7), 5, "rejection")
    alone = run_all(engine, [good])[0]
    assert len(alone[0]) == 12 and poison not in alone[0] and sum(alone[1]) == 11
    for prompt in ([poison] * 30, [7] * 20 + [poison], [poison] + [7] * 20):
        bad = engine.submit(replace(good, prompt_ids=prompt))
        assert engine.run()[bad].finish_reason == "error"
        assert run_all(engine, [good])[0] == alone


def test_a_drafter_of_nan_costs_drafts_and_nothing_else(models: Models) -> None:
    """Draft logits and confidences NaN after some tokens: `rejection` and `coupled` emit the target's text, the
    scheduler admits nothing on the word of such a row, and nobody's request fails."""
    target, drafter = models
    last = jnp.asarray(np.arange(target.table.shape[0]) % (VOCAB + 1) == BAD)
    spoiled = drafter.replace(
        table=jnp.where(last[None, :, None], jnp.nan, drafter.table),
        confidence=jnp.where(last[None, :], jnp.nan, drafter.confidence),
    )
    config = engine_config(mode="lagged", step_time=step_times(), max_num_seqs=3, slot_buckets=(3,))
    engine = fresh(Engine(target, spoiled, config))
    requests = random_requests(6, seed=13, max_new_tokens=12, verification="coupled")
    want = expected(models, requests)
    got = run_all(engine, requests)
    assert [tokens for tokens, _, _ in got] == [tokens for tokens, _, _ in want]
    assert any(BAD in tokens for tokens, _, _ in got)
    assert engine.counters()["failed"] == 0 and engine.counters()["accepted"] > 0
