"""The simulated engine decides as the real one does, cycle for cycle and request for request."""

from __future__ import annotations

import numpy as np
import pytest
from serving.arms import ADAPTIVE
from serving.arrivals import Closed
from serving.engines import measure, table_of
from serving.record import record
from serving.simulator import Clock, Server, Simulation
from serving.workload import Workload

from dspark_jax import Sampling
from dspark_jax.engine import Engine
from dspark_jax.engine.report import CycleReport
from tests.engine.cases import VOCAB, engine_config, scripted_models, step_times

SLOTS, TOKENS = 3, (7,)


class Never(Closed):
    """All requests come at once, and no other ones."""

    def answered(self, now: float) -> None:
        pass


@pytest.mark.usefixtures("x64")
def test_recorded_traces_lead_the_scheduler_to_the_decisions_of_the_engine() -> None:
    """Seven greedy requests on three slots, lagged. The engine's drafts and texts are recorded with nothing admitted;
    the simulation replays them. Both verify the same drafts of the same requests in the same cycles: with drafts,
    without, probing, and while requests come and go."""
    models = scripted_models()
    rng = np.random.default_rng(5)
    prompts = tuple(tuple(rng.integers(0, VOCAB, 6).tolist()) for _ in range(7))
    work = Workload(prompts, ("x",) * 7, 24, Sampling(temperature=0.0))
    shape = {"max_num_seqs": SLOTS, "slot_buckets": (SLOTS,), "token_buckets": TOKENS}
    recorder = Engine(*models, engine_config(mode="threshold", **shape))
    traces = record(recorder, work, 7, SLOTS, say=lambda line: None)
    assert traces.texts == 7 and 0 < traces.accepted.mean() < 2
    steps = measure({"recorder": recorder}, {SLOTS}, seconds=0.0)  # no adaptive engine decides by them
    measured = table_of(steps["recorder"], 48)
    assert measured.at(48, SLOTS).tokens.tolist() == [7, 12] and (measured.draft_ms or 0) > 0
    assert not recorder.has_work()

    table = step_times(slope=0.45, draft_ms=0.3)
    engine = Engine(*models, engine_config(mode="lagged", step_time=table, **shape))
    reports: list[CycleReport] = []
    engine.watch(reports.append)
    order = work.order(0xACCE97)  # that of the recording: texts are in it
    for number in range(7):
        engine.submit(work.request(next(order), number))
    engine.run()
    real = [
        (
            r.cycle,
            list(r.requests),
            r.offered.tolist() if r.survival is not None else [0] * len(r.requests),
            r.scheduled,
        )
        for r in reports
        if r.requests
    ]

    found: list[tuple[int, list[int], list[int], int]] = []
    simulation = Simulation(
        ADAPTIVE, traces, Clock(table, 48, measured=False), Never(7), Server(SLOTS, prompts_a_step=1), order=range(7),
        watch=lambda *report: found.append((report[0], report[1], report[2].tolist(), report[3])),
    )  # fmt: skip
    while simulation.released < 7:
        simulation.step()
    simulated = [row for row in found if row[1]]
    assert len({row[3] for row in real}) > 3  # it did decide something
    assert simulated == real
