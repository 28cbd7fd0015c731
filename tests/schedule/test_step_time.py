"""The step-time table: a staircase taken as given, chosen by slots and context, saved, loaded, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.schedule.step_time import StepTimeTable, isotonic


def test_ms_is_the_entry_of_the_smallest_listed_count_never_interpolated() -> None:
    """A step of 3 tokens runs the program of 4, and costs what that costs; 0 tokens run the smallest one."""
    table = StepTimeTable(tokens=[1, 4, 8], milliseconds=[2.0, 3.0, 7.0])
    assert [table.ms(t) for t in range(9)] == [2.0, 2.0, 3.0, 3.0, 3.0, 7.0, 7.0, 7.0, 7.0]
    assert [table.bucket(t) for t in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    assert table.last == 8


def test_beyond_the_last_entry_is_an_error_that_names_it() -> None:
    table = StepTimeTable(tokens=[1, 4], milliseconds=[2.0, 3.0])
    for call in (table.ms, table.bucket, lambda t: table.window(t, 1)):
        with pytest.raises(ValueError, match="5 tokens are outside .* last entry is 4 tokens"):
            call(5)
        with pytest.raises(ValueError, match="-1 tokens are outside"):
            call(-1)


def test_a_table_is_taken_as_given_even_where_it_falls() -> None:
    """Only `profile` makes what it measured monotone."""
    table = StepTimeTable(tokens=[1, 2, 3], milliseconds=[3.0, 1.0, 2.0])
    assert [table.ms(t) for t in (1, 2, 3)] == [3.0, 1.0, 2.0]


def test_window_and_dense_agree_with_ms_one_by_one() -> None:
    """Every start and length over a table with gaps: the same numbers, cut or infinite beyond the end."""
    table = StepTimeTable(tokens=[2, 3, 7, 12], milliseconds=[2.0, 1.0, 5.0, 4.0])
    for first in range(13):
        for count in range(1, 16):
            expected = [table.ms(t) for t in range(first, min(first + count, 13))]
            assert table.window(first, count).tolist() == expected
    dense = table.dense(14)
    assert dense[:13].tolist() == [table.ms(t) for t in range(13)]
    assert np.isinf(dense[13:]).all() and dense.shape == (15,)
    assert table.dense(5).tolist() == [table.ms(t) for t in range(6)]


def test_windows_are_copies_and_the_table_itself_is_read_only() -> None:
    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 2.0])
    table.window(1, 2)[:] = 0.0
    assert table.milliseconds.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        table.milliseconds[0] = 9.0


def test_tables_are_equal_and_hashed_by_value() -> None:
    """So that one can be a static argument of a jitted function."""
    first = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 2.0], slots=4)
    same = StepTimeTable(tokens=np.array([1, 2]), milliseconds=(1, 2), slots=4)
    other = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 2.5], slots=4)
    assert first == same and hash(first) == hash(same)
    assert first != other and first != "table"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": [2, 1]}, "tokens"),
        ({"tokens": [1, 1]}, "tokens"),
        ({"tokens": [-1, 1]}, "tokens"),
        ({"tokens": [1.0, 2.0]}, "tokens"),
        ({"tokens": ["1", "2"]}, "tokens"),
        ({"tokens": [[1], [2]]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"milliseconds": [1.0]}, "milliseconds"),
        ({"milliseconds": [1.0, float("nan")]}, "milliseconds"),
        ({"milliseconds": [1.0, -2.0]}, "milliseconds"),
        ({"milliseconds": [0.0, 2.0]}, "milliseconds"),
        ({"milliseconds": ["1", "2"]}, "milliseconds"),
        ({"milliseconds": [1.0, None]}, "milliseconds"),
        ({"milliseconds": [[1.0], [2.0, 3.0]]}, "milliseconds"),
        ({"draft_ms": -1.0}, "draft_ms"),
        ({"draft_ms": "1"}, "draft_ms"),
        ({"slots": 1.5}, "slots"),
        ({"context_tokens": -1}, "context_tokens"),
        ({"machine": 3}, "machine"),
    ],
)
def test_a_malformed_field_is_refused_by_name_in_memory_and_in_a_file(
    change: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """One clear error: the file, then the field."""
    content = {"tokens": [1, 2], "milliseconds": [1.0, 2.0], **change}
    with pytest.raises(ValueError, match=f"^{field}: "):
        StepTimeTable(**content)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"table.json: {field}: "):
        StepTimeTable.load(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "table.json: "),
        ("[1]", "table.json: an object"),
        ('{"tokens": [1]}', "table.json: milliseconds: missing"),
        ('{"tokens": [1], "milliseconds": [Infinity]}', "table.json: milliseconds: finite"),
        ('{"tokens": [1], "milliseconds": [1], "millisecond": 1}', "table.json: millisecond: not a field"),
        ('{"tokens": [1], "milliseconds": [1], "rows": 3}', "table.json: rows: a list"),
        (
            '{"tokens": [1], "milliseconds": [1], "rows": [{"tokens": [1]}]}',
            r"rows\[0\]: milliseconds: missing",
        ),
        (
            '{"tokens": [1], "milliseconds": [1], "rows": [{"tokens": [1], "milliseconds": [-1]}]}',
            r"table.json: rows\[0\]: milliseconds: ",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        StepTimeTable.load(path)


def test_save_and_load_keep_every_field_and_row(tmp_path: Path) -> None:
    origin: dict[str, Any] = dict(machine="box", device="cpu", dtype="float32", commit="abc", model_hash="123")
    rows = [
        StepTimeTable(
            tokens=[1, 4],
            milliseconds=[0.1 + s, 1 / 3 + c],
            slots=s,
            context_tokens=c,
            draft_ms=0.7,
            **origin,
        )
        for s in (1, 8)
        for c in (128, 512)
    ]
    for i, table in enumerate((rows[0], StepTimeTable.combine(rows), StepTimeTable([1], [2.0]))):
        path = tmp_path / f"{i}.json"
        table.save(path)
        assert StepTimeTable.load(path) == table


def test_an_infinite_entry_works_in_memory_and_cannot_be_saved(tmp_path: Path) -> None:
    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, np.inf])
    assert table.ms(2) == np.inf
    with pytest.raises(ValueError, match="t.json: milliseconds: infinite"):
        table.save(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_at_takes_the_smallest_slots_and_context_that_hold_the_batch() -> None:
    """The row of the program that will run; beyond what was measured, the largest; slots before context."""
    rows = [
        StepTimeTable(tokens=[1], milliseconds=[10.0 * s + c], slots=s, context_tokens=c)
        for s in (1, 4, 8)
        for c in (2, 5)
    ]
    table = StepTimeTable.combine(rows)
    chosen = {
        (c, s): (row.slots, row.context_tokens) for c in (1, 2, 3, 9) for s in (1, 3, 8, 20) for row in [table.at(c, s)]
    }
    assert chosen == {
        **{(1, 1): (1, 2), (2, 1): (1, 2), (3, 1): (1, 5), (9, 1): (1, 5)},
        **{(1, 3): (4, 2), (2, 3): (4, 2), (3, 3): (4, 5), (9, 3): (4, 5)},
        **{(1, 8): (8, 2), (2, 8): (8, 2), (3, 8): (8, 5), (9, 8): (8, 5)},
        **{(1, 20): (8, 2), (2, 20): (8, 2), (3, 20): (8, 5), (9, 20): (8, 5)},
    }
    assert table.ms(1) == 85.0, "a combined table itself is its widest row"


def test_at_of_a_single_table_is_that_table() -> None:
    table = StepTimeTable(tokens=[1], milliseconds=[1.0], slots=2)
    assert table.at(4096, 64) is table


def test_at_falls_back_on_a_row_that_names_no_context() -> None:
    named = StepTimeTable(tokens=[1], milliseconds=[1.0], slots=1, context_tokens=16)
    general = StepTimeTable(tokens=[1], milliseconds=[2.0], slots=1)
    table = StepTimeTable.combine([named, general])
    assert table.at(8, 1).ms(1) == 1.0
    assert table.at(17, 1).ms(1) == 2.0


def test_combine_refuses_rows_that_do_not_belong_together() -> None:
    here = StepTimeTable(tokens=[1], milliseconds=[1.0], slots=1, machine="a")
    there = StepTimeTable(tokens=[1], milliseconds=[1.0], slots=2, machine="b")
    with pytest.raises(ValueError, match="machine differs"):
        StepTimeTable.combine([here, there])
    with pytest.raises(ValueError, match="two tables for the same"):
        StepTimeTable.combine([here, here])
    with pytest.raises(ValueError, match="at least one"):
        StepTimeTable.combine([])


def test_differences_names_what_was_measured_elsewhere() -> None:
    """What either side does not know is not compared."""
    table = StepTimeTable(tokens=[1], milliseconds=[1.0], machine="a", model_hash="1")
    assert table.differences(machine="a", model_hash="1", dtype="float32", commit=None) == ()
    (line,) = table.differences(machine="b", model_hash="1")
    assert "machine" in line and "'a'" in line and "'b'" in line
    with pytest.raises(ValueError, match="colour"):
        table.differences(colour="red")


def test_a_flat_table_says_so() -> None:
    assert StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 1.01]).is_flat
    assert not StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 1.1]).is_flat


class FakeMachine:
    """A clock that only the measured functions move: seconds by token count, one list entry a call."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.calls: list[int] = []

    def clock(self) -> float:
        return self.now

    def step(self, tokens: int) -> None:
        self.calls.append(tokens)
        series = self.seconds[tokens]
        self.now += series.pop(0) if len(series) > 1 else series[0]


def test_profile_takes_medians_after_a_warm_up_in_rounds() -> None:
    """First calls (compilation) are not timed, an outlier does not count, and token counts take turns."""
    machine = FakeMachine({1: [9.0, 0.001, 0.5, 0.001], 2: [9.0, 0.002, 0.002, 0.7]})
    table = StepTimeTable.profile(machine.step, [1, 2], repeats=3, clock=machine.clock, slots=2, machine="fake")
    assert table.tokens.tolist() == [1, 2]
    assert table.milliseconds == pytest.approx([1.0, 2.0])
    assert (table.slots, table.machine, table.draft_ms) == (2, "fake", None)
    assert machine.calls == [1, 2] + [1, 2] * 3


def test_profile_makes_what_it_measured_monotone() -> None:
    """Medians 1, 3, 2, 5 ms: the dip and the entry before it share their mean."""
    machine = FakeMachine({1: [0.001], 2: [0.003], 4: [0.002], 8: [0.005]})
    table = StepTimeTable.profile(machine.step, [1, 2, 4, 8], repeats=1, clock=machine.clock)
    assert table.milliseconds == pytest.approx([1.0, 2.5, 2.5, 5.0])


def test_profile_begins_no_round_after_its_budget_and_makes_one_at_least() -> None:
    machine = FakeMachine({1: [1.0]})
    StepTimeTable.profile(machine.step, [1], repeats=100, warmup=2, budget_s=5.0, clock=machine.clock)
    assert len(machine.calls) == 5
    machine = FakeMachine({1: [1.0]})
    table = StepTimeTable.profile(machine.step, [1], repeats=100, budget_s=0.0, clock=machine.clock)
    assert len(machine.calls) == 2 and table.ms(1) == pytest.approx(1000.0)


def test_profile_measures_the_draft_beside_the_steps() -> None:
    machine = FakeMachine({1: [0.001], 0: [7.0, 0.004]})
    table = StepTimeTable.profile(
        machine.step, [1], measure_draft=lambda: machine.step(0), repeats=2, clock=machine.clock
    )
    assert table.draft_ms == pytest.approx(4.0)
    assert table.tokens.tolist() == [1]


def test_profile_refuses_malformed_arguments() -> None:
    machine = FakeMachine({1: [1.0]})
    with pytest.raises(ValueError, match="tokens"):
        StepTimeTable.profile(machine.step, [2, 1])
    with pytest.raises(ValueError, match="repeats"):
        StepTimeTable.profile(machine.step, [1], repeats=0)
    assert machine.calls == []


def test_isotonic_is_the_least_squares_monotone_fit() -> None:
    """By hand: 3 and 1 pool to 2, then 0 pulls all three to 4/3; what is monotone stays."""
    assert isotonic(np.array([3.0, 1.0, 0.0, 5.0])) == pytest.approx([4 / 3, 4 / 3, 4 / 3, 5.0])
    assert isotonic(np.array([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, 3.0]
