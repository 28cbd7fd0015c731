"""Predicted against measured step times: tracked by program, said when they part, and followed where that is asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dspark_jax.engine.buckets import Buckets, Key
from dspark_jax.engine.drift import LEAST, Drift
from dspark_jax.schedule import StepTimeTable, capacity

BUCKETS = Buckets(
    slots=(2,), contexts=(64,), single=(), prefill=(16,), drafts=3, skips=True, tokens={2: (4, 8)}
)  # fmt: skip
PLAIN, FOUR, EIGHT = Key("plain", 2, 2, 64), Key("verify", 2, 4, 64), Key("verify", 2, 8, 64)
TABLE = StepTimeTable(tokens=[2, 4, 8], milliseconds=[10.0, 12.0, 14.0])
DRAFT_MS = 3.0


def watched(drift: Drift, key: Key, ratio: float, cycles: int, first: int = 0) -> None:
    for n in range(first, first + cycles):
        drift.observe(n, key, 10.0, 10.0 * ratio)


def test_a_drift_is_said_once_and_again_when_it_goes_on(caplog: Any) -> None:
    """Nothing at 10 % and at an odd cycle; a line where it passes 1.25 times, one more at 1.25 of that; the ratio is a
    running mean."""
    drift = Drift(BUCKETS, correct=False)
    watched(drift, FOUR, 1.1, 50)
    assert drift.ratio == pytest.approx(1.1) and caplog.records == []
    drift.observe(50, FOUR, 10.0, 1e6)
    assert drift.ratio == pytest.approx(1.1 * 2**0.02) and caplog.records == []  # counts as if it were twice
    for ratio, lines in ((1.5, 1), (1.9, 2)):
        watched(drift, FOUR, ratio, 600, 51)
        assert drift.ratio == pytest.approx(ratio, rel=0.01) and len(caplog.records) == lines
    for n in range(1000):  # a machine that goes to and fro is not said to at every turn
        watched(drift, FOUR, (0.5, 8.0)[n // 100 % 2], 1)
    assert len(caplog.records) <= 2 + 1000 // 256 + 1
    assert "step times drift: cycles take" in caplog.text and "correct_step_times would follow it" in caplog.text


def test_the_line_names_the_program_that_is_furthest_off(caplog: Any) -> None:
    drift = Drift(BUCKETS, correct=False)
    watched(drift, PLAIN, 1.0, 2 * LEAST)
    watched(drift, EIGHT, 3.0, LEAST // 2)
    assert caplog.records == []  # 3 ** 0.2 = 1.246 by then
    watched(drift, EIGHT, 3.0, LEAST)
    drift.advance(99)
    watched(drift, EIGHT, 3.0, 400)
    assert f"{EIGHT} 3.00 times" in caplog.text


def test_without_the_option_the_table_stays_as_it_is() -> None:
    drift = Drift(BUCKETS, correct=False)
    watched(drift, EIGHT, 3.0, 50)
    drift.advance(60)
    assert drift.corrected(TABLE, DRAFT_MS, 2, 2, 64) is TABLE


def test_a_correction_is_of_the_program_and_of_the_whole_cycle() -> None:
    """Cycles of eight tokens take 1.5 times (3 + 14) ms: with the draft as it was, the entry is 22.5. The plain step
    takes half of its 10. Four tokens were not measured. The first entry is the plain step also where fewer work."""
    drift = Drift(BUCKETS, correct=True)
    watched(drift, EIGHT, 1.5, LEAST)
    watched(drift, PLAIN, 0.5, LEAST)
    drift.advance(99)
    assert drift.corrected(TABLE, DRAFT_MS, 2, 2, 64).milliseconds == pytest.approx([5.0, 12.0, 22.5])
    one = StepTimeTable(tokens=[1, 4, 8], milliseconds=[10.0, 12.0, 14.0])
    assert drift.corrected(one, DRAFT_MS, 1, 2, 64).milliseconds == pytest.approx([5.0, 12.0, 22.5])


def test_a_cycle_knows_what_is_two_cycles_old_and_no_more() -> None:
    """Eight cycles are needed; 0 .. 7 are, of which cycle 8 may not know the last."""
    drift = Drift(BUCKETS, correct=True)
    watched(drift, EIGHT, 2.0, LEAST)
    drift.advance(LEAST)
    assert drift.corrected(TABLE, DRAFT_MS, 2, 2, 64) is TABLE
    drift.advance(LEAST + 1)
    assert drift.corrected(TABLE, DRAFT_MS, 2, 2, 64) is not TABLE


def test_decisions_follow_a_machine_that_has_changed_and_predictions_close_in() -> None:
    """Drafting pays by the table (survivals 0.9: eight tokens in 17 ms for two in 10); in truth verify steps take
    three times as long. In a loop with the two cycles of lag: drafts until it is known, none after; predictions of
    drafting cycles are right by then although they keep being corrected."""
    survival = np.full((2, 3), 0.9)
    assert capacity(survival, TABLE, DRAFT_MS) == 6
    drift, flying, drafts, errors = Drift(BUCKETS, correct=True), [], [], []
    for n in range(60):
        drift.advance(n)
        table = drift.corrected(TABLE, DRAFT_MS, 2, 2, 64)
        wanted = capacity(survival, table, DRAFT_MS) if n < 40 else 6  # in the end drafts are forced, as by a probe
        drafts.append(wanted)
        key = EIGHT if wanted > 2 else FOUR if wanted else PLAIN
        predicted = table.ms(2 + wanted) + (DRAFT_MS if wanted else 0.0)
        whole = TABLE.ms(2 + wanted) + (DRAFT_MS if wanted else 0.0)
        measured = whole * (3.0 if wanted else 1.0)
        errors.append(abs(math.log(measured / predicted)))
        flying.append((n, key, predicted, measured))
        if len(flying) > 1:
            drift.observe(*flying.pop(0))
    assert drafts[0] == 6 and drafts[39] == 0
    assert max(errors[:5]) > 1.0 and max(errors[41:]) < 0.01


def test_what_was_not_measured_says_nothing() -> None:
    drift = Drift(BUCKETS, correct=True)
    drift.observe(0, PLAIN, 0.0, 1.0)
    drift.observe(1, PLAIN, 1.0, 0.0)
    drift.observe(2, PLAIN, math.inf, 1.0)
    assert drift.ratio == 1.0
