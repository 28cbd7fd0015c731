"""Weights on a mesh: the state follows them, and every program finds it where it expects it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import warnings
warnings.simplefilter("error")
import jax
from jax.sharding import NamedSharding, PartitionSpec
from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.testing import tiny_drafter, tiny_target

mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
models = [tiny_target(num_layers=1)]
models.append(tiny_drafter(models[0], block_size=2, target_layer_ids=(0,)))
texts = []
for place in (None, NamedSharding(mesh, PartitionSpec())):
    target, drafter = models if place is None else jax.device_put(models, place)
    config = EngineConfig(max_num_seqs=2, max_model_len=40, mode="fixed", prefill_buckets=(8,), max_programs=1)
    engine = Engine(target, drafter, config)
    engine.warmup()
    for known in (False, True):  # the second time with the first block of every prompt out of the store
        ids = [engine.submit(Request([1, 2, n] * 6, 12, Sampling(0.0))) for n in range(2)]
        results = engine.run()
        texts.append([results[i].tokens for i in ids])
    assert engine.counters()["prefix_cache_hits"] == 2 * 16
    assert engine.counters()["late_compiles"] == 0
    print(engine._state.target.k[0].sharding)
assert texts[1:] == texts[:1] * 3, texts
"""


@pytest.mark.slow
def test_an_engine_on_two_devices_emits_what_one_device_emits() -> None:
    """Caches are cut along their key/value heads; devices are made by XLA, so it runs in a process of its own."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "'model'" in done.stdout
