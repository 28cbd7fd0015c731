"""Gemma 4 in the serving engine: caches of two shapes in slots, windows past slot reuse."""

from __future__ import annotations

import numpy as np

import dspark_jax
from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, EngineConfig, Request
from tests.oracle import oracle_dir


def test_the_engine_gives_the_text_of_the_reference() -> None:
    """Three requests over two slots, so that one slot is used again."""
    folder = oracle_dir() / "gemma4_dspark"
    target = dspark_jax.load_target(oracle_dir() / "targets" / "gemma4_tiny", dtype="float32")
    drafter = dspark_jax.load_drafter(folder / "draft", target)
    want = np.load(folder / "expected.npz")
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=96,
        mode="fixed",
        prefill_buckets=(32,),
        slot_buckets=(2,),
        max_programs=1,
    )
    engine = Engine(target, drafter, config)
    prompts = [want[f"p{i}.prompt_ids"].tolist() for i in range(3)]
    ids = [engine.submit(Request(p, 64, sampling=Sampling(temperature=0.0))) for p in prompts]
    results = engine.run()
    for i, request in enumerate(ids):
        assert list(results[request].tokens) == want[f"p{i}.gen.output_ids"].tolist()
