"""A long random load: nothing is compiled, memory stays flat, nobody is lost or answered twice.

It lasts DSPARK_SOAK_SECONDS (60 by default; the project asks for 600 before a release):

    DSPARK_SOAK_SECONDS=600 pytest tests/engine/test_soak.py -m slow
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, Event, Request
from dspark_jax.testing import tiny_drafter, tiny_target
from tests.engine.cases import engine_config, step_times

SECONDS = float(os.environ.get("DSPARK_SOAK_SECONDS", "60"))
WINDOW, VOCAB = 96, 32
RSS_SLACK_MB = 48
"""Growth that is no leak: pools of the allocator, Python's own. One cache of the engine that stayed behind at each of
thousands of steps would be far more."""

UNREAD_FLAGS = 8
"""Bytes of flags, one a copy into the prefix store, which are read when the next request comes: between the two
measurements their number may differ by a few. One left behind by each request would be hundreds."""


def rss_mb() -> float:
    """Memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def live_bytes() -> int:
    """Of arrays on the device."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


class Load:
    """Random requests and aborts; what has been asked for and what was answered."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rng = engine, np.random.default_rng(0)
        self.asked: dict[int, Request] = {}
        self.tokens: Counter[int] = Counter()  # streamed
        self.answers: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.cancelled: set[int] = set()
        self.errors: list[str] = []

    def request(self) -> Request:
        rng = self.rng
        prompt = rng.integers(0, VOCAB, rng.integers(1, WINDOW - 1)).tolist()
        sampling = Sampling(
            float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            int(rng.choice([0, 0, 5])),
            float(rng.choice([1.0, 0.9])),
            float(rng.choice([0.0, 0.05])),
        )
        limit = int(rng.integers(1, WINDOW - len(prompt) + 1))
        stops = tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist())
        seed = int(rng.integers(4)) if rng.random() < 0.5 else None  # equal seeds meet
        rule = [None, "rejection", "coupled"][rng.integers(3)]
        return Request(prompt, limit, sampling, seed, rule, stops)

    def turn(self) -> None:
        """Up to 12 at work or waiting, then a pause until few are left; a request in eight is given up."""
        busy = len(self.asked) - sum(self.answers.values())
        if busy < 12 and self.rng.random() < 0.7:
            request = self.request()
            self.asked[self.engine.submit(request)] = request
        if self.asked and self.rng.random() < 0.02:
            victim = int(self.rng.choice(list(self.asked)[-8:]))
            self.engine.cancel(victim)
            self.cancelled.add(victim)
        for event in self.engine.step():
            self.take(event)

    def take(self, event: Event) -> None:
        if self.answers[event.id]:
            self.errors.append(f"{event.id}: an event after the last one")
        self.tokens[event.id] += len(event.tokens)
        if event.finished:
            self.answers[event.id] += 1
            self.reasons[str(event.finish_reason)] += 1
            if event.result is None or len(event.result.tokens) != self.tokens[event.id]:
                self.errors.append(f"{event.id}: the result is not what was streamed")
            elif event.finish_reason == "length" and len(event.result.tokens) != self.asked[event.id].max_new_tokens:
                self.errors.append(f"{event.id}: {len(event.result.tokens)} tokens")


@pytest.mark.slow
def test_a_long_random_load_compiles_nothing_keeps_its_memory_and_loses_nobody() -> None:
    """Memory is compared after a quarter of the time and at its end, both times with nothing at work."""
    target = tiny_target(num_layers=2, max_positions=WINDOW)
    drafter = tiny_drafter(target, block_size=3)
    config = engine_config(
        mode="lagged", max_model_len=WINDOW, prefill_buckets=(32,), token_buckets=(8, 12), step_time=step_times()
    )
    engine = Engine(target, drafter, config)
    engine.warmup()
    compiled: list[str] = []

    def listen(name: str, seconds: float, **details: Any) -> None:
        if "backend_compile" in name:
            compiled.append(name)

    load, begin = Load(engine), time.monotonic()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        memory = []
        for share in (0.25, 1.0):
            while time.monotonic() - begin < share * SECONDS:
                load.turn()
            while engine.has_work():
                for event in engine.step():
                    load.take(event)
            memory.append((live_bytes(), rss_mb()))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)

    assert load.errors == []
    assert set(load.answers) == set(load.asked) and set(load.answers.values()) == {1}
    assert {"length", "stop", "cancelled"} <= set(load.reasons) and "error" not in load.reasons
    assert load.reasons["cancelled"] <= len(load.cancelled)
    assert compiled == [] and engine.counters()["late_compiles"] == 0
    assert abs(memory[1][0] - memory[0][0]) <= UNREAD_FLAGS
    assert memory[1][1] < memory[0][1] + RSS_SLACK_MB
    counters = engine.counters()
    assert counters["running"] == counters["waiting"] == 0 and counters["requests"] == len(load.asked)
    assert counters["finished"] + counters["cancelled"] == len(load.asked) and counters["skipped_drafts"] > 0
