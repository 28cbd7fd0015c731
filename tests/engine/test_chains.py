"""Chains in the engine: prompts in pieces, slots that move, blocks of any length; the same cycles as generate()."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.generate import generate
from tests.engine.cases import CHAIN_BLOCK as BLOCK
from tests.engine.cases import engine_config, expected, fresh, run_all, step_times


def test_engine_and_generate_run_the_same_cycles_with_a_chain(chain_engine: Engine, chain: tuple[Any, Any]) -> None:
    """Tokens, committed and offered of every request: a state lost between two pieces of a prompt, or left behind by
    a slot that moved, would change what is accepted."""
    engine = fresh(chain_engine)
    assert engine.mode == "fixed" and engine.buckets.drafts == BLOCK
    prompts, new = ([3, 1, 4, 1, 5, 2, 6], [0, 1, 6, 2, 4, 3, 1, 0, 2, 5, 6]), (10, 16)
    requests = [
        Request(prompt, n, sampling=Sampling(temperature=0.8), seed=11 + i, verification="rejection")
        for i, (prompt, n) in enumerate(zip(prompts, new, strict=True))
    ]
    got = run_all(engine, requests)
    assert got == expected(chain, requests, num_speculative_tokens=BLOCK)
    assert engine.counters()["moves"] > 0
    assert np.mean(got[1][1]) > 1.3, got


def test_a_chain_that_was_not_asked_for_a_while_drafts_as_if_it_had_absorbed_every_token(
    chain: tuple[Any, Any],
) -> None:
    """No confidence head: ``lagged`` learns acceptance by position. Drafts never pay here, so all but the probes are
    skipped, and what a probe keeps must be what ``generate`` keeps that begins at the same token with a whole context.
    """
    both = chain
    config = engine_config(mode="lagged", step_time=step_times(slope=50.0), num_speculative_tokens=BLOCK)
    engine = Engine(*both, config)
    assert engine.mode == "lagged" and any("learns acceptance by position" in note for note in engine.notes)
    prompt, new = [3, 1, 4, 1, 5], 48
    engine.submit(Request(prompt, new, Sampling(0.0)))
    (result,) = engine.run().values()
    probes = [i for i, offered in enumerate(result.offered) if offered]
    assert len(probes) >= 2 and len(result.offered) - len(probes) > 20
    assert engine.counters()["absorbed_later"] > 20

    text = prompt + result.tokens
    # The anchor of cycle i is the last of 1 + sum(committed[:i]) new tokens; its prompt is all before it.
    before = [len(prompt) + sum(result.committed[:i]) for i in probes]
    padded = np.zeros((len(before), len(text)), np.int32)
    for row, n in enumerate(before):
        padded[row, :n] = text[:n]
    seeds = jnp.zeros(len(before), jnp.uint32)
    out = generate(
        *both, jnp.asarray(padded), jnp.asarray(before, jnp.int32), seeds=seeds, max_new_tokens=BLOCK + 2,
        sampling=Sampling(0.0), num_speculative_tokens=BLOCK,
    )  # fmt: skip
    whole = np.asarray(out.committed[:, 0])  # of a block of which the engine's program has room for the first drafts
    assert [result.committed[i] for i in probes] == np.minimum(whole, [result.offered[i] + 1 for i in probes]).tolist()
    assert out.tokens[:, 0].tolist() == [text[n] for n in before]
    assert max(result.committed[i] for i in probes) > 1


def test_a_threshold_needs_confidences(chain: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        Engine(*chain, engine_config(mode="threshold"))
