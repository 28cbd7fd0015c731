"""Cells of load on an engine that can be counted by hand, and what is made of them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from serving import load_analysis as analysis
from serving.cells import BLOCKS, Meter, run_cell, schedule
from serving.engines import over_rounds, table_of
from serving.load_report import markdown
from serving.studies import bars, rises
from serving.workload import Workload

from dspark_jax.engine import Request
from dspark_jax.engine.report import CycleReport
from dspark_jax.engine.request import Event
from dspark_jax.schedule import StepTimeTable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class OneTokenEngine:
    """A token for every request and step of a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.left, self.ids = clock, {}, itertools.count(1)
        self.most = 0

    def submit(self, request: Request) -> int:
        number = next(self.ids)
        self.left[number] = request.max_new_tokens
        self.most = max(self.most, len(self.left))
        return number

    def cancel(self, number: int) -> None:
        del self.left[number]

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Event]:
        self.clock.now += 1.0
        events = []
        for number in list(self.left):
            self.left[number] -= 1
            done = self.left[number] == 0
            events.append(Event(number, tokens=[7], finished=done))
            if done:
                del self.left[number]
        return events


WORK = Workload(((1, 2), (3, 4), (5, 6)), ("x",) * 3, 10)


def test_a_cell_keeps_its_users_and_counts_tokens_of_its_own_time() -> None:
    """Four users, a token a second each: 4 tokens/s whatever ends and begins, and an idle engine behind it."""
    clock = Clock()
    engine = OneTokenEngine(clock)
    found = run_cell(engine, Meter(), WORK.feed(4, 0), 4, 18.0, warm_seconds=3.0, clock=clock)  # type: ignore[arg-type]
    assert found["tokens"] == 72 and found["seconds"] == 18.0
    assert found["blocks"] == [4] + [8] * (BLOCKS - 2) + [12]  # the step that ends a block counts in the next one
    assert engine.most == 4 and not engine.left


def test_first_requests_of_a_cell_are_of_every_age_and_all_arms_get_the_same_ones() -> None:
    first, again = (list(itertools.islice(WORK.feed(5, 0), 12)) for _ in range(2))
    assert first == again
    assert sorted(r.max_new_tokens for r in first[:5]) == [2, 4, 6, 8, 10]
    assert {r.max_new_tokens for r in first[5:]} == {10}
    assert [r.seed for r in first] == list(range(12))


def test_a_round_has_every_cell_once_and_those_that_are_only_shown_in_the_first() -> None:
    cells = schedule(["none", "adaptive"], [1, 4], [8], 3, seed=0)
    for number in range(3):
        own = [(c, arm) for r, c, arm in cells if r == number]
        users = [1, 4, 8] if number == 0 else [1, 4]
        assert sorted(own) == sorted(itertools.product(users, ["none", "adaptive"]))
    assert [c[1:] for c in cells if c[0] == 1] != [c[1:] for c in cells if c[0] == 2]  # in another order


def report(**changes: object) -> CycleReport:
    values = {
        "cycle": 0, "program": "verify", "slots": 2, "tokens": 4, "context": 64, "requests": (1, 2),
        "committed": np.array([2, 1]), "offered": np.array([1, 1]), "accepted": np.array([1, 0]),
        "drafted": np.array([3, 3]), "survival": np.array([[0.5, 0.4, 0.1], [0.3, 0.2, 0.1]]), "scheduled": 2,
        "probe": False, "fallback": False, "predicted_ms": 12.0, "measured_ms": 13.0,
        "decoding_ms": 13.0,
    }  # fmt: skip
    return CycleReport(**{**values, **changes})  # type: ignore[arg-type]


def test_the_meter_predicts_by_survivals_of_admitted_drafts_and_the_table() -> None:
    """Two anchors and admitted survivals 0.5 and 0.3: 2.8 tokens expected in 12 ms. Plain decoding makes 2 in the 8 ms
    of the table's first entry, 3 in these 12: a predicted speed-up of 0.933. Cycles beside a prompt are not timed,
    those that absorb are."""
    meter = Meter(StepTimeTable([2, 4], [8.0, 11.0], slots=2))
    meter(report())  # not on yet
    meter.start()
    meter(report())
    meter(report(measured_ms=None, decoding_ms=None))  # beside a prompt
    meter(report(measured_ms=None, decoding_ms=20.0))  # absorbs
    sums = meter.stop()
    assert sums["cycles"] == 3 and sums["alone_cycles"] == 2 and sums["absorbing_cycles"] == 1
    assert sums["alone_ms"] == pytest.approx(33.0) and sums["alone_committed"] == 6
    assert sums["predicted_tokens"] == pytest.approx(5.6) and sums["predicted_plain_tokens"] == pytest.approx(6.0)
    assert analysis.predicted_speedup([sums]) == pytest.approx(2.8 / 3)


def cell(arm: str, number: int, speed: float, **changes: object) -> dict[str, object]:
    values = {
        "arm": arm, "round": number, "concurrency": 4, "seconds": 9.0, "tokens": round(9 * speed),
        "blocks": [speed] * BLOCKS, "finished": 3, "cycles": 10, "request_cycles": 40, "committed": 60, "offered": 40,
        "accepted": 20, "alone_cycles": 8, "alone_ms": 800.0, "alone_committed": 8 * speed, "load_average": [0.1, 1.0],
        "predicted_ms": 800.0, "predicted_tokens": 90.0, "predicted_plain_tokens": 80.0,
    }  # fmt: skip
    return {**values, **changes}


def cells() -> list[dict[str, object]]:
    speeds = {"none": (10, 10, 10, 10), "fixed 1": (12, 12, 9, 9), "adaptive": (9, 9, 10.8, 10.8)}
    return [cell(arm, number, s) for arm, row in speeds.items() for number, s in enumerate(row)]


def test_the_best_fixed_arm_is_chosen_by_the_first_rounds_and_compared_in_the_others() -> None:
    """fixed 1 wins the first two rounds with 12 against 10. In the last two it makes 9 and the adaptive arm 10.8: the
    ratio is 1.2, not that of the rounds it was chosen by. All parts are alike, so the interval is the ratio itself."""
    found = analysis.analyse(cells(), [4], [])
    (comparison,) = found["comparisons"]
    assert comparison["best_fixed"] == "fixed 1"
    assert comparison["ratio"] == pytest.approx(1.2)
    assert comparison["interval"] == pytest.approx([1.2, 1.2])
    assert comparison["ratio_ok"] and comparison["interval_reaches_1"]
    assert comparison["predicted_speedup"] == pytest.approx(90 / 80)
    assert comparison["measured_speedup"] == pytest.approx(9.9 / 10)
    assert not comparison["prediction_ok"]  # 1.125 / 0.99 is 14 % off


def test_the_interval_covers_the_variation_between_rounds() -> None:
    """Ratios of 0.8 and 1.2 in two rounds of equal speed below: 1.0, between the two."""
    ratio, low, high = analysis.paired_ratio([cell("a", 0, 8), cell("a", 1, 12)], [cell("b", 0, 10), cell("b", 1, 10)])
    assert (ratio, low, high) == pytest.approx((1.0, 0.8, 1.2))


def test_prompts_take_the_same_time_however_fast_decoding_is() -> None:
    """Decoding is half of the plain arm's time: twice as fast, the whole takes three quarters."""
    half = [cell("none", 0, 10, cycles=9, alone_cycles=9, alone_ms=4500.0)]
    assert analysis.decoding_share(half) == pytest.approx(0.5)
    assert analysis.with_prompts(2.0, half) == pytest.approx(4 / 3)


SETTINGS = {"target": "t", "drafter": "d", "seconds": 9.0, "rounds": 4, "temperature": 0.0, "max_new_tokens": 10}
HEAD = {"settings": SETTINGS, "processor": "p", "cores": 2, "jax": "0", "commit": "c", "command": "python x"}


def test_a_report_is_made_of_cells_without_a_cycle_that_counts() -> None:
    """Cells too short for a cycle that no prompt disturbed have no such sums: what is not known is shown as -."""
    names = [name for name in cell("none", 0, 10) if name.startswith(("alone_", "predicted_"))]
    bare = [{k: v for k, v in c.items() if k not in names} for c in cells()]
    found = analysis.analyse(bare, [4], [])
    (comparison,) = found["comparisons"]
    assert comparison["measured_speedup"] is None and not comparison["prediction_ok"]
    assert "| - | - | - | 0.9889 | missed: prediction, prediction with prompts |" in markdown({**HEAD, **found})


def test_both_speed_ups_are_judged_and_programs_compiled_within_cells_are_said() -> None:
    """Decoding all of the time, 1.0 is predicted where 1.2 is measured."""
    slow = [cell("none", n, 10, cycles=9, alone_cycles=9, alone_ms=9000.0, alone_committed=90) for n in range(4)]
    fast = {"predicted_tokens": 80.0, "alone_ms": 9000.0, "alone_committed": 108, "late_compiles": 2}
    text = markdown(
        {**HEAD, **analysis.analyse([*slow, *(cell("adaptive", n, 12, **fast) for n in range(4))], [4], [])}
    )
    assert "missed: prediction, prediction with prompts" in text and "| 1 | 1.2 | 1 | 1.2 |" in text
    assert "Programs compiled within cells: 8 (" in text


def test_step_times_are_medians_over_rounds_and_a_plain_step_comes_before_one_that_verifies() -> None:
    """Three rounds, of which one was disturbed. A dip (9 behind 10) is noise: both are 9.5."""
    first = {("plain", 2, 2): 4.0, ("verify", 2, 2): 5.0, ("verify", 2, 4): 10.0, ("verify", 2, 6): 9.0}
    first |= {("draft", 2, 0): 1.0, ("draft", 2, 3): 0.5}
    rounds = [first, {place: 9 * ms for place, ms in first.items()}, first]
    row = table_of(over_rounds(rounds), 64).at(64, 2)
    assert row.tokens.tolist() == [2, 4, 6] and row.milliseconds.tolist() == [4.0, 9.5, 9.5] and row.draft_ms == 1.0
    assert row.draft_ms_by_width == ((3, 0.5),)


def test_the_report_names_bars_that_were_missed() -> None:
    text = markdown({**HEAD, **analysis.analyse(cells(), [4], [])})
    assert "missed: prediction" in text and "| fixed 1 | 1.200 [1.200, 1.200] |" in text


def test_simulated_bars_compare_with_the_best_fixed_arm_at_every_load() -> None:
    rows = [
        {"arm": arm, "concurrency": users, "tokens_per_s": speed, "drafts_per_request": drafts}
        for users, speeds in {1: (10, 20, 5, 22), 8: (50, 40, 5, 49)}.items()
        for arm, speed, drafts in zip(("none", "fixed 3", "MTP-1", "adaptive"), speeds, (0, 3, 1, users), strict=True)
    ]
    found = bars(rows, [1, 8])
    assert [(b["best_fixed"], b["ratio"]) for b in found] == [("fixed 3", 1.1), ("none", 0.98)]
    assert rises(found) == [8]


def test_a_workload_keeps_what_it_is_asked_for() -> None:
    request = dataclasses.replace(WORK, stop_token_ids=(9,)).request(1, 7, 3)
    assert (request.prompt_ids, request.max_new_tokens, request.seed, request.stop_token_ids) == ((3, 4), 3, 7, (9,))
