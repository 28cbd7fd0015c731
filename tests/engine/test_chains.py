"""Chains in the engine: prompts in pieces, slots that move, blocks of any length; the same cycles as generate()."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.nn.norm import rms_norm
from dspark_jax.testing import ScriptedTarget, tiny_target
from tests.drafters.chain_cases import tiny_chain
from tests.engine.cases import engine_config, expected, run_all

VOCAB, BLOCK = 7, 5


def models() -> tuple[ScriptedTarget, Any]:
    """A bigram target as a table, and an EAGLE-3 chain that reads its token ids as features. The block is longer
    than the drafter's own of 4."""
    target = tiny_target(vocab_size=VOCAB, dtype=jnp.float64)
    drafter: Any = tiny_chain(target, "eagle3").drafter
    normed = rms_norm(target.params["embed_tokens"], None, 1e-6)
    bigrams = 0.2 * normed @ target.params["lm_head"].T
    table = jnp.concatenate([bigrams, jnp.zeros((1, VOCAB))])
    fc = jax.random.normal(jax.random.key(5), (target.config.hidden_size, len(drafter.taps)), jnp.float64)
    return ScriptedTarget(table, max_positions=64), drafter.replace(params={**drafter.params, "fc": 0.1 * fc})


def test_engine_and_generate_run_the_same_cycles_with_a_chain() -> None:
    """Tokens, committed and offered of every request: a state lost between two pieces of a prompt, or left behind by
    a slot that moved, would change what is accepted."""
    both = models()
    config = engine_config(
        max_num_seqs=2, num_speculative_tokens=BLOCK, prefill_buckets=(4,), slot_buckets=(1,), context_buckets=None
    )
    engine = Engine(*both, config)
    assert engine.mode == "fixed" and engine.buckets.drafts == BLOCK
    prompts, new = ([3, 1, 4, 1, 5, 2, 6], [0, 1, 6, 2, 4, 3, 1, 0, 2, 5, 6]), (10, 16)
    requests = [
        Request(prompt, n, sampling=Sampling(temperature=0.8), seed=11 + i, verification="rejection")
        for i, (prompt, n) in enumerate(zip(prompts, new, strict=True))
    ]
    got = run_all(engine, requests)
    assert got == expected(both, requests, num_speculative_tokens=BLOCK)
    assert engine.counters()["moves"] > 0
    assert np.mean(got[1][1]) > 1.3, got


def test_modes_that_need_confidences_fall_back_and_say_so() -> None:
    both = models()
    engine = Engine(*both, engine_config(mode="lagged"))
    assert engine.mode == "fixed" and engine.buckets.drafts == 4
    assert any("no confidence head" in note for note in engine.notes)
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        Engine(*both, engine_config(mode="threshold"))
    engine.submit(Request((1, 2), 3))
