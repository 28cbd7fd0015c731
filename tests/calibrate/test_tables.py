"""Calibration tables: what they do to logits, which one a request gets, and their file against what breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import Calibration, CalibrationTables, fit, load_tables, save_tables
from tests.calibrate.made_up import records


def test_apply_divides_logits_by_their_positions_temperature() -> None:
    """sigmoid(2 ln 3 / 2) = 3/4, in the logits' dtype, for any leading axes and under jit as an argument."""
    calibration = Calibration(temperature=np.array([2.0, 0.5]))
    logits = jnp.full((2, 3, 2), 2 * np.log(3.0), jnp.float32)
    got = jax.jit(lambda c, x: c.apply(x))(calibration, logits)
    assert got.dtype == jnp.float32 and got.shape == (2, 3, 2)
    np.testing.assert_allclose(got[..., 0], 0.75, rtol=1e-6)
    np.testing.assert_allclose(got[..., 1], 81 / 82, rtol=1e-6)
    np.testing.assert_allclose(calibration.apply(logits), got, rtol=1e-6)


def test_apply_takes_the_first_positions_and_refuses_more_than_it_knows() -> None:
    """A drafter may keep its first K drafts; fitted from the left, the first K stand alone."""
    calibration = Calibration(temperature=np.array([2.0, 0.5, 1.0]))
    logits = jnp.array([[1.0, -1.0]])
    shorter = Calibration(temperature=np.array([2.0, 0.5]))
    assert calibration.apply(logits).tolist() == shorter.apply(logits).tolist()
    with pytest.raises(ValueError, match="3 positions, but the calibration has 2"):
        shorter.apply(jnp.zeros((1, 3)))


def test_a_calibration_is_a_pytree_whose_rule_is_static() -> None:
    """Temperatures may be traced; the rule and the temperature of the records select programs."""
    calibration = fit(*records(), verification="coupled", sampling_temperature=0.0)
    leaves = jax.tree.leaves(calibration)
    assert [leaf.shape for leaf in leaves] == [(3,)] * 3
    moved = jax.tree.map(jnp.asarray, calibration)
    assert (moved.verification, moved.sampling_temperature) == ("coupled", 0.0)


def same(first: Calibration, second: Calibration) -> bool:
    arrays = ((getattr(first, n), getattr(second, n)) for n in ("temperature", "ece_before", "ece_after", "shift"))
    static = (first.verification, first.sampling_temperature) == (
        second.verification,
        second.sampling_temperature,
    )
    return static and all((a is None and b is None) or (a is not None and np.array_equal(a, b)) for a, b in arrays)


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_save_and_load_give_the_same_calibration_to_the_bit(verification: str, tmp_path: Path) -> None:
    calibration = fit(*records(), verification=verification)
    path = tmp_path / "calibration.json"
    calibration.save(path)
    assert same(Calibration.load(path), calibration)
    assert same(Calibration.load(path, verification=verification, positions=3), calibration)
    # "temperatures" is the rejection table for other readers; no other rule may pose as it.
    assert ("temperatures" in json.loads(path.read_text())) == (verification == "rejection")


def three_tables() -> list[Calibration]:
    return [
        fit(*records(seed=1), verification="coupled"),
        fit(*records(seed=2)),
        fit(*records(seed=3), sampling_temperature=0.0),
    ]


def test_a_file_of_several_tables_keeps_them_all_and_shows_the_rejection_one_at_the_top(
    tmp_path: Path,
) -> None:
    tables = three_tables()
    path = tmp_path / "calibration.json"
    save_tables(path, tables)
    loaded = load_tables(path, positions=3)
    assert len(loaded) == 3
    assert all(same(a, b) for a, b in zip(loaded, tables, strict=True))
    assert len(jax.tree.leaves(loaded)) == 9, "a pytree"
    assert json.loads(path.read_text())["temperatures"] == tables[1].temperature.tolist()
    assert same(Calibration.load(path), tables[1])
    assert same(Calibration.load(path, sampling_temperature=0.0), tables[2])
    with pytest.raises(ValueError, match=r"calibration.json: no table for \('coupled', 0.0\)"):
        Calibration.load(path, verification="coupled", sampling_temperature=0.0)


def test_a_request_below_1e5_takes_the_greedy_table_and_others_their_rules_table() -> None:
    """At temperature 0 both rules are one, so either's table serves; none means raw confidences."""
    coupled, rejection, greedy = three_tables()
    tables = CalibrationTables((coupled, rejection, greedy))
    assert tables.pick("rejection", 0.0) is greedy
    assert tables.pick("coupled", 9e-6) is greedy
    assert tables.pick("rejection", 1e-5) is rejection
    assert tables.pick("coupled", 0.7) is coupled
    assert CalibrationTables((rejection,)).pick("coupled", 1.0) is None
    assert CalibrationTables((rejection,)).pick("rejection", 0.0) is None
    with pytest.raises(ValueError, match="verification"):
        tables.pick("greedy", 1.0)


@pytest.mark.parametrize("name", ["temperatures", "sts_temperatures"])
def test_a_file_with_nothing_but_temperatures_is_the_rejection_table(name: str, tmp_path: Path) -> None:
    """Written by hand or by another tool; unknown keys of other tools are ignored."""
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({name: [1, 0.5], "made_by": "another tool"}))
    loaded = Calibration.load(path)
    assert same(loaded, Calibration(temperature=np.array([1.0, 0.5])))
    assert (loaded.verification, loaded.sampling_temperature) == ("rejection", 1.0)


GOOD = {"verification": "rejection", "sampling_temperature": 1.0, "temperatures": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"temperatures": [1.0]}, "temperatures: 2 entries expected, got 1"),
        ({"temperatures": [1.0, 0.0]}, "temperatures: finite entries > 0"),
        ({"temperatures": [1.0, -1.0]}, "temperatures: finite entries > 0"),
        ({"temperatures": [1.0, float("nan")]}, "temperatures: finite entries > 0"),
        ({"temperatures": [1.0, float("inf")]}, "temperatures: finite entries > 0"),
        ({"temperatures": [1.0, 10**400]}, "temperatures: entry too large"),
        ({"temperatures": [1.0, "2"]}, "temperatures: a flat list of numbers"),
        ({"temperatures": [1.0, True]}, "temperatures: a flat list of numbers"),
        ({"temperatures": [1.0, None]}, "temperatures: a flat list of numbers"),
        ({"temperatures": [[1.0], [2.0]]}, "temperatures: a flat list of numbers"),
        ({"temperatures": "1, 2"}, "temperatures: a flat list of numbers"),
        ({"temperatures": []}, "temperatures: a flat list of numbers"),
        ({"temperatures": [1.0, 2.0], "sts_temperatures": [1.0, 3.0]}, "sts_temperatures: differs"),
        ({"temperatures": [1.0, 3.0], "tables": [GOOD]}, "temperatures: differs"),
        ({"tables": [GOOD, GOOD]}, r"tables\[1\]: a second table"),
        ({"tables": {}}, "tables: a list"),
        ({"tables": [3]}, r"tables\[0\]: an object"),
        ({"tables": [{"temperatures": [1.0, 2.0]}]}, r"tables\[0\].verification: missing"),
        ({"tables": [{**GOOD, "verification": "x"}]}, r"tables\[0\].verification: one of"),
        ({"tables": [{**GOOD, "sampling_temperature": "1"}]}, r"tables\[0\].sampling_temperature: "),
        ({"tables": [{**GOOD, "temperatures": [0, 1]}]}, r"tables\[0\].temperatures: finite entries > 0"),
        ({"tables": [{**GOOD, "ece_before": [0.1]}]}, r"tables\[0\].ece_before: 2 entries expected"),
        ({"tables": [{**GOOD, "ece_after": [0.1, 2.0]}]}, r"tables\[0\].ece_after: entries in \[0, 1\]"),
        ({"shifted_tables": [GOOD]}, r"shifted_tables\[0\].shift: missing"),
        ({"shifted_tables": [{**GOOD, "shift": "1"}]}, r"shifted_tables\[0\].shift: a number within 100 of 0"),
        ({"shifted_tables": [{**GOOD, "shift": float("nan")}]}, r"shifted_tables\[0\].shift: a number within 100"),
        ({"shifted_tables": [{**GOOD, "shift": 101}]}, r"shifted_tables\[0\].shift: a number within 100"),
        ({"shifted_tables": [{**GOOD, "shift": 1}] * 2}, r"shifted_tables\[1\]: a second table"),
        ({"shifted_tables": {}, **GOOD}, "shifted_tables: a list"),
        ({"tables": [{**GOOD, "shift": 0.0}]}, r"tables\[0\].shift: a table with a shift belongs into shifted_tables"),
        ({"tables": [{**GOOD, "sampling_temperature": 10**400}]}, r"tables\[0\].sampling_temperature: a finite number"),
        ({}, "neither temperatures"),
        ([1.0, 2.0], "a JSON object expected"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_entry(content: Any, match: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"calibration.json: {match}"):
        Calibration.load(path, positions=2)


def test_a_file_that_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="calibration.json: "):
        Calibration.load(path)


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    good = Calibration(temperature=np.array([1.0, 2.0]))
    for bad in (
        [],
        [good, good],
        [good, Calibration(temperature=np.array([1.0]), verification="coupled")],
        [Calibration(temperature=np.array([0.0]))],
        [Calibration(temperature=np.array([1.0]), shift=np.inf)],
    ):
        with pytest.raises(ValueError, match="calibration.json not written: "):
            save_tables(path, bad)
        assert not path.exists()


def test_a_shifted_table_lies_apart_in_the_file_and_goes_before_the_other(tmp_path: Path) -> None:
    """What other engines read are the temperatures that belong to no shift; ours takes the shifted table of a rule
    where there is one, and the other where there is none."""
    plain, shifted = fit(*records()), fit(*records(), shifts=(-0.5, 0.25))
    greedy = fit(*records(seed=3), sampling_temperature=0.0)
    path = tmp_path / "calibration.json"
    save_tables(path, [shifted, plain, greedy])
    content = json.loads(path.read_text())
    assert content["temperatures"] == content["tables"][0]["temperatures"] == plain.temperature.tolist()
    assert len(content["tables"]) == 2 and "shift" not in content["tables"][0]
    assert [table["shift"] for table in content["shifted_tables"]] == [shifted.shift]
    tables = load_tables(path, positions=3)
    assert len(tables) == 3
    picked, other = tables.pick("rejection", 0.7), tables.pick("rejection", 0.0)
    assert picked is not None and same(picked, shifted) and other is not None and same(other, greedy)
    assert same(Calibration.load(path), shifted)
    save_tables(path, [shifted])
    assert "temperatures" not in json.loads(path.read_text()), "no temperatures for those who know no shift"
    assert same(Calibration.load(path), shifted)


def test_a_shift_is_added_before_the_temperature() -> None:
    """sigmoid((0 + 2 ln 3) / 2) = 3/4, as an argument of a jitted function and outside one."""
    calibration = Calibration(temperature=np.array([2.0]), shift=2 * np.log(3.0))
    got = jax.jit(lambda c, x: c.apply(x))(calibration, jnp.zeros(1, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 0.75, rtol=1e-6)
    np.testing.assert_allclose(calibration.apply(jnp.zeros(1, jnp.float32)), 0.75, rtol=1e-6)


def test_tables_of_different_lengths_are_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    shifted = {**GOOD, "temperatures": [1.0], "shift": 0.0}
    path.write_text(json.dumps({"tables": [GOOD], "shifted_tables": [shifted]}))
    with pytest.raises(
        ValueError, match=r"lengths: \[\('rejection', 1.0, 2\), \('rejection', 1.0, 'shifted_tables', 1\)\]"
    ):
        load_tables(path)
