"""The simulated engine against sums made by hand, and against the real one."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from serving.arms import ADAPTIVE, NONE, Arm
from serving.arrivals import Closed, Poisson
from serving.simulator import Clock, Server, Simulation, top_k
from serving.synthetic import synthetic
from serving.traces import Traces

from dspark_jax.schedule import StepTimeTable, admit_top_k_device

FIXED2 = Arm("fixed 2", "fixed", 2)
ARMS = (NONE, FIXED2, Arm("threshold", "threshold", threshold=0.5), ADAPTIVE, Arm("early stop", "early_stop"),
        Arm("current", "current"))  # fmt: skip


def constant(accepted: int, rows: int, texts: int = 1, width: int = 2) -> Traces:
    """Texts of ``rows`` rows in which every block has ``accepted`` good drafts, as far as the text goes."""
    left = np.tile(np.arange(rows, 0, -1), texts)
    survival = np.full((rows * texts, width), 0.5, np.float32)
    starts = np.arange(texts + 1) * rows
    return Traces(survival, np.minimum(accepted, left).astype(np.int16), starts, ("x",) * texts, np.ones(width))


def clock(tokens: list[int], ms: list[float], draft_ms: float = 0.0) -> Clock:
    return Clock(StepTimeTable(tokens, ms, draft_ms=draft_ms), context=64, measured=False)


class Few:
    """Arrivals that come to an end."""

    def __init__(self, times: list[float]) -> None:
        self.times = deque(times)

    def answered(self, now: float) -> None:
        pass

    def next_time(self) -> float:
        return self.times[0] if self.times else math.inf

    def take(self) -> float:
        return self.times.popleft()


def test_throughput_of_one_user_without_drafts_is_one_token_a_step_and_the_prompts() -> None:
    """A text of 9 tokens behind the first: 9 steps of 10 ms, and the prompt of 10 ms that gives the first token. Ten
    tokens in 100 ms."""
    simulation = Simulation(NONE, constant(2, 9), clock([1], [10.0]), Closed(1), Server(1, prompt_ms=10.0))
    found = simulation.run(cycles=90)
    assert found["tokens_per_s"] == pytest.approx(100.0)
    assert found["drafts_per_request"] == 0


def test_throughput_of_one_user_with_two_drafts_that_are_always_accepted() -> None:
    """A text of 9 rows goes in cycles of 3 tokens, each 12 ms of verifying 3 tokens and 2 ms of drafting. Three cycles
    make it, and since a cycle is read one cycle late, a fourth runs for nobody: 10 tokens in 56 ms."""
    simulation = Simulation(FIXED2, constant(2, 9), clock([1, 3], [10.0, 12.0], 2.0), Closed(1), Server(1))
    found = simulation.run(cycles=40)
    assert found["tokens_per_s"] == pytest.approx(10 / 0.056, rel=1e-4)
    assert found["acceptance"] == 1.0 and found["drafts_per_request"] == 2.0


def test_rejected_drafts_cost_and_bring_one_token() -> None:
    """No draft is accepted: 9 cycles of 14 ms for 9 tokens; the last one has one token left, which is known, so no
    cycle runs for nobody."""
    simulation = Simulation(FIXED2, constant(0, 9), clock([1, 3], [10.0, 12.0], 2.0), Closed(1), Server(1))
    assert simulation.run(cycles=90)["tokens_per_s"] == pytest.approx(10 / 0.126, rel=1e-4)


def test_a_threshold_waits_for_the_scores_and_admits_by_them() -> None:
    """Raw confidences are 0.5, then 1.0 (0.5 / 0.5): a threshold of 0.6 admits nothing, one of 0.5 everything. Nothing
    overlaps: no cycle for nobody, 3 cycles of 14 ms and 1 ms of the host for 10 tokens."""
    times, server = clock([1, 3], [10.0, 12.0], 2.0), Server(1, host_ms=1.0)
    low = Simulation(Arm("t", "threshold", threshold=0.5), constant(2, 9), times, Closed(1), server)
    high = Simulation(Arm("t", "threshold", threshold=0.6), constant(2, 9), times, Closed(1), server)
    assert low.run(cycles=30)["tokens_per_s"] == pytest.approx(10 / 0.045, rel=1e-4)
    assert high.run(cycles=30)["drafts_per_request"] == 0.0


def test_adaptive_drafts_where_it_pays_and_not_where_it_costs() -> None:
    """Drafts that are nearly certain: free steps admit both of them, steps in proportion to their tokens none (but for
    the probes)."""
    sure = Traces(np.full((64, 2), 0.99, np.float32), constant(2, 64).accepted, np.array([0, 64]), ("x",), np.ones(2))
    flat = Simulation(ADAPTIVE, sure, clock([1, 3], [10.0, 10.1], 0.1), Closed(1), Server(1))
    steep = Simulation(ADAPTIVE, sure, clock([1, 2, 3], [10.0, 20.0, 30.0], 1.0), Closed(1), Server(1))
    assert flat.run(cycles=200)["drafts_per_request"] > 1.9
    assert steep.run(cycles=2000)["drafts_per_request"] < 0.05


def test_narrow_blocks_are_drafted_where_the_table_has_a_time_of_them() -> None:
    """One draft of four is good. Blocks of two cost 1 ms, whole ones 4; only narrow ones are drafted but for a look at
    the whole now and then, and the draft time that is saved is (nearly) that difference in each cycle."""
    survival = np.tile(np.array([0.9, 0.1, 0.01, 0.0], np.float32), (256, 1))
    traces = Traces(survival, constant(1, 256).accepted, np.array([0, 256]), ("x",), np.ones(4))
    found = {}
    for by_width in ((), ((2, 1.0),)):
        table = StepTimeTable([1, 2, 3, 5], [10.0, 11.0, 16.0, 20.0], draft_ms=4.0, draft_ms_by_width=by_width)
        arm = Arm("adaptive", "lagged", drafts=4)
        simulation = Simulation(arm, traces, Clock(table, context=64, measured=False), Closed(1), Server(1))
        found[by_width] = simulation.run(cycles=500)["tokens_per_s"]
    ratio = found[(2, 1.0),] / found[()]
    assert ratio == pytest.approx(15.0 / 12.0, rel=0.05)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_request_is_answered_once_with_its_whole_text(arm: Arm) -> None:
    """Twenty requests at odd times on three slots: all end, none twice, and the tokens are those of their texts (one
    more each: the prompt's)."""
    traces = synthetic({"code": (0.9, 0.8, 0.7)}, texts=20, tokens=20, seed=1)
    times = np.random.default_rng(0).exponential(0.05, 20).cumsum().tolist()
    table = clock(list(range(1, 13)), [10.0 + t for t in range(1, 13)], 1.0)
    simulation = Simulation(arm, traces, table, Few(times), Server(3))  # type: ignore[arg-type]
    while simulation.released < 20:
        simulation.step()
        assert simulation.admitted == simulation.released + simulation.held and simulation.held <= 3
    assert simulation.sums.tokens == len(traces.accepted) + 20
    assert simulation.sums.finished == 20


def test_a_closed_loop_keeps_its_users() -> None:
    """After any number of steps the requests at work and those that are about to come are as many as the users."""
    traces = synthetic({"code": (0.9, 0.8)}, texts=8, tokens=12, seed=2)
    arrivals = Closed(5)
    table = clock([1, 5, 15], [5.0, 6.0, 9.0], 1.0)
    simulation = Simulation(ADAPTIVE, traces, table, arrivals, Server(5))
    for _ in range(300):
        simulation.step()
        assert simulation.held + len(arrivals._due) + len(simulation._waiting) == 5


def test_poisson_arrivals_come_at_their_rate_and_wait_half_a_step() -> None:
    """10 requests a second that take 9 steps of 10 ms each, on eight slots, so that nobody waits for one. The
    mean of 1,500 arrivals is within 13 % (five standard deviations; the seed is fixed)."""
    simulation = Simulation(NONE, constant(0, 9), clock([8], [10.0]), Poisson(10.0, 3), Server(8))
    found = simulation.run(seconds=150.0)
    assert found["finished"] / found["simulated_s"] == pytest.approx(10.0, rel=0.13)
    assert found["mean_latency_s"] == pytest.approx(0.095, abs=0.01)  # 90 ms, and half a step until one begins


def test_forced_drafts_come_first_as_in_the_draft_program() -> None:
    """The host's choice equals the device's, which ranks forced drafts by the number 2, on tables with ties."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        survival = np.cumprod(rng.integers(0, 5, (6, 4)) / 4, axis=1).astype(np.float32)
        least = rng.integers(-1, 3, 6)
        survival[least < 0] = 0.0
        forced = (np.arange(4) < least[:, None]) & (survival > 0)
        total = int(rng.integers(0, 20))
        expected = admit_top_k_device(np.where(forced, np.float32(2), survival), total)
        assert top_k(survival, least, total).tolist() == np.asarray(expected).tolist()
