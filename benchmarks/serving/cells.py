"""A cell of load: one engine, a number of users who each ask again as soon as they are answered, for some seconds."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax import Engine, Request
from dspark_jax.engine.report import CycleReport
from dspark_jax.schedule import StepTimeTable

BLOCKS = 9
"""Parts of a cell whose tokens are counted apart, for bootstrap intervals: 5 s each in a cell of 45 s."""


class Meter:
    """Adds up the cycles of an engine while it is on.

    Cycles that a prompt (or a move or copy that requests' ends bring) disturbed are not timed; those that absorbed held
    tokens are: the drafter's catching up is part of the price of probes and of drafts after a skip, and it is in no
    table.

    What is predicted of a cycle: in ``report.predicted_ms`` (the table that decided it, and the draft) a token for
    every request, and for every admitted draft its calibrated survival as the cycle's own block was scored. The
    scheduler chose the number of drafts by what it expected from older scores, which its decision does not carry.

    Args:
        table: step times that the engine decides by; None: it does not, and nothing is predicted.
    """

    def __init__(self, table: StepTimeTable | None = None) -> None:
        self.table, self.on = table, False
        self.sums: dict[str, float] = {}

    def start(self) -> None:
        self.on, self.sums = True, {}

    def stop(self) -> dict[str, float]:
        self.on = False
        return self.sums

    def _add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(number)

    def __call__(self, report: CycleReport) -> None:
        if not self.on:
            return
        rows = len(report.requests)
        committed = int(report.committed.sum())
        self._add(
            cycles=1,
            request_cycles=rows,
            committed=committed,
            offered=report.offered.sum(),
            accepted=report.accepted.sum(),
            cycles_with_drafts=report.survival is not None or report.offered.any(),
            probes=report.probe,
        )
        if report.decoding_ms is None:
            return  # a prompt ran in between: what the cycle itself took is not known
        self._add(alone_cycles=1, alone_ms=report.decoding_ms, alone_committed=committed)
        self._add(absorbing_cycles=report.measured_ms is None)
        if report.predicted_ms is not None and self.table is not None:
            expected = float(rows)
            if report.survival is not None:
                admitted = np.arange(report.survival.shape[1]) < report.offered[:, None]
                expected += float((report.survival * admitted).sum())
            plain_ms = self.table.at(report.context, report.slots).milliseconds[0]
            # What plain decoding would make while this cycle runs, by the same table.
            plain = rows * report.predicted_ms / plain_ms
            self._add(predicted_ms=report.predicted_ms, predicted_tokens=expected, predicted_plain_tokens=plain)


@dataclasses.dataclass
class Loop:
    """Users of an engine. ``tokens``: ids of requests that have got their first one."""

    engine: Engine
    feed: Iterator[Request]
    open: set[int] = dataclasses.field(default_factory=set)
    begun: set[int] = dataclasses.field(default_factory=set)
    finished: int = 0

    def send(self) -> None:
        self.open.add(self.engine.submit(next(self.feed)))

    def step(self) -> int:
        """A step of the engine; who is answered asks again. Returns the new tokens."""
        new = 0
        for event in self.engine.step():
            new += len(event.tokens)
            if event.tokens:
                self.begun.add(event.id)
            if event.finished:
                self.open.discard(event.id)
                self.finished += 1
                self.send()
        return new

    def drain(self) -> None:
        for request in self.open:
            self.engine.cancel(request)
        while self.engine.has_work():
            self.engine.step()


def run_cell(
    engine: Engine,
    meter: Meter,
    feed: Iterator[Request],
    concurrency: int,
    seconds: float,
    *,
    warm_seconds: float = 3.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Runs one cell on an idle engine, and leaves it idle.

    Time begins once all first requests have their first token and ``warm_seconds`` have passed.

    Returns:
        ``tokens`` in ``seconds`` (both as measured), ``blocks [BLOCKS]`` of tokens, sums of ``Meter``, requests
        finished, the load average before and after.
    """
    before = os.getloadavg()[0]
    loop = Loop(engine, feed)
    for _ in range(concurrency):
        loop.send()
    first, begin = set(loop.open), clock()
    while not first <= loop.begun or clock() - begin < warm_seconds:
        loop.step()
    loop.finished = 0
    meter.start()
    begin, tokens, blocks = clock(), 0, np.zeros(BLOCKS, np.int64)
    elapsed = 0.0
    while elapsed < seconds:
        new = loop.step()
        elapsed = clock() - begin
        tokens += new
        blocks[min(int(BLOCKS * elapsed / seconds), BLOCKS - 1)] += new
    sums = meter.stop()
    loop.drain()
    return {
        "seconds": round(elapsed, 3),
        "tokens": tokens,
        "finished": loop.finished,
        "blocks": blocks.tolist(),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        **{name: round(value, 3) for name, value in sums.items()},
    }


def prompt_ms(
    engines: Mapping[str, Engine], requests: Sequence[Request], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Milliseconds that a prompt takes on each engine, all of them idle: the mean over ``requests`` of one new token
    each, one after the other and every one by all engines in turn. The first request is run and not counted."""
    seconds = dict.fromkeys(engines, 0.0)
    for number, request in enumerate(requests):
        for name, engine in engines.items():
            begin = clock()
            engine.submit(request)
            engine.run()
            seconds[name] += clock() - begin if number else 0.0
    return {name: 1e3 * total / (len(requests) - 1) for name, total in seconds.items()}


def schedule(
    arms: Sequence[str], concurrency: Sequence[int], shown: Sequence[int], rounds: int, seed: int
) -> list[tuple[int, int, str]]:
    """(round, concurrency, arm) of all cells, each round in its own random order; ``shown`` run in the first only."""
    cells: list[tuple[int, int, str]] = []
    for number in range(rounds):
        users = [*concurrency, *(shown if number == 0 else ())]
        own = [(number, c, arm) for c in users for arm in arms]
        order = np.random.default_rng([seed, number]).permutation(len(own))
        cells += [own[i] for i in order]
    return cells
