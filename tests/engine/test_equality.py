"""The engine and ``generate`` are two drivers of one cycle: the same keys give the same tokens.

Text, committed and offered lengths are compared entry by entry, with requests of all kinds in one batch, more of
them than slots, entering and leaving at different times.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Request
from dspark_jax.generate import generate
from tests.engine.cases import Models, engine_config, expected, fresh, random_requests, run_all


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_the_engine_emits_what_generate_emits(fixed_engine: Engine, models: Models, overlap: bool) -> None:
    """Greedy, rejection and coupled requests in one batch; the serial twin too."""
    engine = fresh(fixed_engine, overlap=overlap)
    requests = random_requests(13, seed=1)
    assert run_all(engine, requests) == expected(models, requests)


def test_batch_mates_do_not_change_a_text_at_fixed_length(fixed: Engine) -> None:
    """The same requests alone, one after the other, and all together; mates with the same seed included."""
    requests = random_requests(6, seed=2)
    requests += [Request(requests[1].prompt_ids, 9, Sampling(0.8), requests[1].seed, "rejection")]
    alone = [run_all(fixed, [request])[0] for request in requests]
    assert run_all(fixed, requests) == alone


def test_settings_of_batch_mates_stay_their_own(fixed: Engine) -> None:
    """Temperature, filters, rule, stop tokens and limits, all different, in one batch: each as it is alone."""
    settings = (
        Sampling(0.0),
        Sampling(1.2),
        Sampling(0.8, top_k=2),
        Sampling(1.5, top_p=0.6),
        Sampling(1.0, min_p=0.3),
        Sampling(0.7, top_k=4, top_p=0.9, min_p=0.05),
        Sampling(2.0, top_k=1),
    )
    requests = [
        Request([1 + i % 5, i % 7], 16 - i, s, 40 + i, rule, (i % 7,) if i % 3 == 0 else ())
        for i, (s, rule) in enumerate([(s, rule) for s in settings for rule in ("rejection", "coupled")])
    ]
    alone = [run_all(fixed, [request])[0] for request in requests]
    assert run_all(fixed, requests) == alone and len({tuple(tokens) for tokens, _, _ in alone}) > 8
    greedy = run_all(fixed, [Request(requests[-1].prompt_ids, 3, Sampling(0.0))])[0][0]
    assert alone[-1][0] == greedy[: len(alone[-1][0])]  # top_k 1


def test_plain_decoding_emits_the_coupled_text(models: Models) -> None:
    """Mode none: no drafter runs, and the numbers are those of `coupled` (DESIGN section 3)."""
    engine = Engine(*models, engine_config(mode="none", slot_buckets=(4,)))
    requests = random_requests(6, seed=3, verification="coupled")
    plain = run_all(engine, requests)
    assert [p[0] for p in plain] == [e[0] for e in expected(models, requests)]
    assert all(set(p[2]) <= {0} and set(p[1]) <= {1} for p in plain)
    assert engine.counters()["drafted"] == 0


def test_a_static_threshold_offers_what_generate_offers(models: Models) -> None:
    """The host reads the lengths back, so the forward is as small as they allow."""
    config = engine_config(mode="threshold", confidence_threshold=0.7, slot_buckets=(4,), token_buckets=(8,))
    engine = Engine(*models, config)
    engine.warmup()
    requests = random_requests(6, seed=4, sampling=Sampling(0.8), verification="rejection")
    want = expected(models, requests, admit="threshold", confidence_threshold=0.7)
    assert run_all(engine, requests) == want
    counters = engine.counters()
    assert counters["tokens_computed"] < counters["cycles"] * engine.buckets.tokens[4][-1]
    assert any("do not overlap" in note for note in engine.notes)


def test_a_transformer_in_float64_emits_what_generate_emits(tiny_engine: Engine, tiny: tuple[Any, Any]) -> None:
    """Real attention, real caches: flat forwards, fewer rows than slots, prompts in pieces."""
    engine = fresh(tiny_engine)
    rng = np.random.default_rng(5)
    lengths = np.array([3, 16, 9, 12, 1])
    prompts = np.zeros((5, 16), np.int32)
    for row, length in enumerate(lengths):
        prompts[row, :length] = rng.integers(0, 31, length)
    seeds = np.arange(5)
    out = generate(
        *tiny, jnp.asarray(prompts), jnp.asarray(lengths), seeds=jnp.asarray(seeds), max_new_tokens=20,
        sampling=Sampling(0.7),
    )  # fmt: skip
    got = run_all(
        engine,
        [Request(p[:n], 20, Sampling(0.7), s, "rejection") for p, n, s in zip(prompts, lengths, seeds, strict=True)],
    )
    for row, (tokens, committed, offered) in enumerate(got):
        assert tokens == out.tokens[row].tolist()
        cycles = len(committed)
        assert committed == out.committed[row, :cycles].tolist() and not out.committed[row, cycles:].any()
        assert offered == out.offered[row, :cycles].tolist()
