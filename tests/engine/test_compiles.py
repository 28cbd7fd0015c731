"""Every shape is compiled at start-up, one progress line each; nothing is compiled in the middle of traffic."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.engine.buckets import Key
from dspark_jax.testing import tiny_drafter, tiny_target
from tests.engine.cases import VOCAB, WINDOW, fresh, step_times


@pytest.mark.parametrize("name", ["fixed_engine", "lagged_engine"])
def test_nothing_is_compiled_after_the_warm_up(request: Any, name: str) -> None:
    """A random load with cancellations, the first behind a reset: neither the engine's own counter nor JAX sees a
    compilation, and none is spared because JAX had kept a small program of an earlier test."""
    engine = fresh(request.getfixturevalue(name))
    lines: list[str] = []
    engine.warmup(lines.append)
    assert all(re.fullmatch(r"compiled \w+( \w+=\d+)* \(\d+/\d+\) \d+\.\d s", line) for line in lines)
    engine.reset()
    jax.clear_caches()
    compiled: list[str] = []

    def listen(name: str, seconds: float, **details: Any) -> None:
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        _load(engine)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [] and engine.counters()["late_compiles"] == 0


def _load(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    ids: list[int] = []
    for _ in range(40):
        if rng.random() < 0.6:
            prompt = rng.integers(0, VOCAB, rng.integers(1, WINDOW)).tolist()
            sampling = Sampling(float(rng.choice([0.0, 1.0])), int(rng.integers(3)), float(rng.choice([0.8, 1.0])))
            ids.append(engine.submit(Request(prompt, int(rng.integers(1, 30)), sampling)))
        if ids and rng.random() < 0.2:
            engine.cancel(int(rng.choice(ids)))
        engine.step()
    engine.run()
    assert engine.counters()["running"] == engine.counters()["waiting"] == 0


def test_a_warm_up_needs_an_idle_engine_and_leaves_it_idle(fixed: Engine) -> None:
    engine = fresh(fixed)
    engine.warmup()
    assert not engine.has_work()
    engine.submit(Request([1], 4))
    with pytest.raises(RuntimeError, match="idle"):
        engine.warmup()
    engine.run()


def test_a_late_compile_is_counted_and_logged(fixed: Engine, caplog: Any) -> None:
    fixed.warmup()
    programs = fixed._programs
    before = fixed.counters()["buckets"]
    fixed.submit(Request([1], 20, Sampling(0.0)))
    fixed.run()
    used = {name for name, number in fixed.counters()["buckets"].items() if number > before.get(name, 0)}
    lost = next(key for key in programs._table if key.kind == "verify" and str(key) in used)
    program = programs._table.pop(lost)
    fixed.submit(Request([1], 20, Sampling(0.0)))
    fixed.run()
    assert fixed.counters()["late_compiles"] == 1 and f"compiled {lost} after the warm-up" in caplog.text
    programs._table[lost], programs.late_compiles, programs.warm = program, 0, False


def test_caches_are_updated_in_place(fixed: Engine) -> None:
    """The state is donated: a step neither copies the caches nor keeps an old one alive."""
    fixed.submit(Request([1, 2, 3], 12, Sampling(0.0)))
    fixed.step()
    before = fixed._state.target
    where = before.unsafe_buffer_pointer()
    fixed.step()
    assert before.is_deleted() and fixed._state.target.unsafe_buffer_pointer() == where
    fixed.run()


def test_no_program_copies_a_whole_cache() -> None:
    """One slot of four, part of the cells: the compiled step holds no copy of a cache, and its state is aliased."""
    target = tiny_target(num_layers=1)
    engine = Engine(target, None, EngineConfig(max_num_seqs=4, max_model_len=200, context_buckets=(64,)))
    cache = engine._state.target.k[0]
    compiled = engine._programs._lower(Key("plain", 1, 1, 64), (engine._state, np.zeros(1, np.int32))).compile()
    shape = ",".join(map(str, cache.shape))
    assert f"[{shape}]" in compiled.as_text() and not re.search(rf"\[{shape}\]\S* copy\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache.nbytes and memory.temp_size_in_bytes < cache.nbytes
    # Nor does the program that copies blocks of text between the slots and the store of prefixes.
    programs = engine._programs
    compiled = programs._lower(Key("copy"), programs._example(Key("copy"), engine._state)).compile()
    assert programs._store is not None
    kept = programs._store.target.k[0]
    for array in (cache, kept):
        shape = ",".join(map(str, array.shape))
        assert f"[{shape}]" in compiled.as_text() and not re.search(rf"\[{shape}\]\S* copy\(", compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * (cache.nbytes + kept.nbytes)


def test_a_cycle_without_drafts_copies_neither_the_drafter_s_cache_nor_the_ring() -> None:
    """They pass through in place; the ring gets one token a row."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=(0,))
    config = EngineConfig(max_num_seqs=4, max_model_len=200, context_buckets=(64,), step_time=step_times())
    engine = Engine(target, drafter, config)
    state = engine._state
    compiled = engine._programs._lower(Key("plain", 1, 1, 64), (state, np.zeros(1, np.int32))).compile()
    text, kept = compiled.as_text(), 0
    for array in (state.target.k[0], state.draft.cache.k[0], state.ring.features):
        shape = ",".join(map(str, array.shape))
        assert f"[{shape}]" in text and not re.search(rf"\[{shape}\]\S* copy\(", text)
        kept += array.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes > kept
