"""Sequential temperature scaling against the oracle, and the calibration file against what breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import metrics, sts
from dspark_jax.calibrate.sts import Calibration, CalibrationTables
from tests.oracle import oracle_dir


def records(count: int = 60, width: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overconfident logits (the truth is sigmoid(logit / 2)) and prefix labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (count, width))
    accepted = np.cumprod(rng.random((count, width)) < metrics.sigmoid(logits / 2), axis=1)
    return logits, accepted


def test_the_grid_is_the_oracles_to_the_bit() -> None:
    cases = np.load(oracle_dir() / "sts" / "cases.npz")
    assert sts.GRID.tolist() == cases["grid"].tolist()
    assert sts.GRID[40] == 1.0


@pytest.mark.parametrize("bins", [10, 20])
def test_every_oracle_case_is_met_exactly(bins: int) -> None:
    """Temperatures to the bit, errors to 1e-12; `saturated` and `all_accepted` have ties on purpose."""
    cases = np.load(oracle_dir() / "sts" / "cases.npz")
    for j in range(int(cases["num_cases"])):
        name = f"s{j:02d}."
        found = sts.fit(cases[name + "logits"], cases[name + "labels"], bins)
        want = {key: cases[f"{name}b{bins}.{key}"] for key in ("temperatures", "ece_before", "ece_after")}
        label = f"{cases[name + 'name']}, {bins} bins"
        assert np.asarray(found.temperature).tolist() == want["temperatures"].tolist(), label
        np.testing.assert_allclose(np.asarray(found.ece_before), want["ece_before"], rtol=0, atol=1e-12, err_msg=label)
        np.testing.assert_allclose(np.asarray(found.ece_after), want["ece_after"], rtol=0, atol=1e-12, err_msg=label)


def test_the_error_of_every_grid_value_is_the_oracles() -> None:
    """Earlier temperatures are the fitted ones, as in a left-to-right fit."""
    cases = np.load(oracle_dir() / "sts" / "cases.npz")
    for j in (3, 6):
        name = f"s{j:02d}."
        logits = cases[name + "logits"].astype(np.float64)
        labels = cases[name + "labels"].astype(np.float64)
        temperatures = cases[name + "b20.temperatures"]
        scores = metrics.survival_scores(logits, temperatures)
        before = np.concatenate([np.ones((len(logits), 1)), scores[:, :-1]], axis=1)
        for k in range(logits.shape[1]):
            got = sts.grid_errors(before[:, k], logits[:, k], labels[:, k], 20)
            np.testing.assert_allclose(got, cases[name + "b20.ece_grid"][k], rtol=0, atol=1e-12)


def test_errors_of_a_fit_are_those_of_the_metrics() -> None:
    """ece_before and ece_after can be recomputed from the records and the temperatures alone."""
    logits, accepted = records()
    found = sts.fit(logits, accepted, bins=10)
    before = metrics.ece(metrics.survival_scores(logits), accepted, 10)
    after = metrics.ece(metrics.survival_scores(logits, found.temperature), accepted, 10)
    np.testing.assert_allclose(np.asarray(found.ece_before), before, atol=1e-15)
    np.testing.assert_allclose(np.asarray(found.ece_after), after, atol=1e-15)


def test_a_tie_goes_to_the_temperature_nearest_to_one() -> None:
    """Logits 0 give one half at every temperature: all 81 tie, and 1 is chosen."""
    found = sts.fit(np.zeros((4, 2)), [[1, 1], [0, 0], [1, 0], [0, 0]])
    assert found.temperature.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("logits", "accepted", "match"),
    [
        (np.zeros((2, 2)), [[0, 1], [1, 1]], r"accepted\[0\]: position 1 is accepted after one that was not"),
        (np.zeros((2, 2)), [[1, 1], [1, 2]], "accepted: 0 or 1"),
        (np.zeros((2, 2)), [[1, 1]], "one shape"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "N, G > 0"),
        (np.zeros(3), np.zeros(3), "one shape"),
        (np.full((1, 1), np.nan), [[1]], "confidence_logits: finite"),
    ],
)
def test_malformed_records_are_refused(logits: Any, accepted: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        sts.fit(logits, accepted)


def test_malformed_settings_of_a_fit_are_refused() -> None:
    logits, accepted = records()
    with pytest.raises(ValueError, match="bins"):
        sts.fit(logits, accepted, 0)
    with pytest.raises(ValueError, match="verification"):
        sts.fit(logits, accepted, verification="greedy")
    with pytest.raises(ValueError, match="sampling_temperature"):
        sts.fit(logits, accepted, sampling_temperature=-1.0)


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
    calibration = sts.fit(*records(), verification="coupled", sampling_temperature=0.0)
    leaves = jax.tree.leaves(calibration)
    assert [leaf.shape for leaf in leaves] == [(3,)] * 3
    moved = jax.tree.map(jnp.asarray, calibration)
    assert (moved.verification, moved.sampling_temperature) == ("coupled", 0.0)


def same(first: Calibration, second: Calibration) -> bool:
    arrays = ((getattr(first, n), getattr(second, n)) for n in ("temperature", "ece_before", "ece_after"))
    static = (first.verification, first.sampling_temperature) == (
        second.verification,
        second.sampling_temperature,
    )
    return static and all((a is None and b is None) or (a is not None and np.array_equal(a, b)) for a, b in arrays)


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_save_and_load_give_the_same_calibration_to_the_bit(verification: str, tmp_path: Path) -> None:
    calibration = sts.fit(*records(), verification=verification)
    path = tmp_path / "calibration.json"
    calibration.save(path)
    assert same(Calibration.load(path), calibration)
    assert same(Calibration.load(path, verification=verification, positions=3), calibration)
    # "temperatures" is the rejection table for other readers; no other rule may pose as it.
    assert ("temperatures" in json.loads(path.read_text())) == (verification == "rejection")


def three_tables() -> list[Calibration]:
    return [
        sts.fit(*records(seed=1), verification="coupled"),
        sts.fit(*records(seed=2)),
        sts.fit(*records(seed=3), sampling_temperature=0.0),
    ]


def test_a_file_of_several_tables_keeps_them_all_and_shows_the_rejection_one_at_the_top(
    tmp_path: Path,
) -> None:
    tables = three_tables()
    path = tmp_path / "calibration.json"
    sts.save_tables(path, tables)
    loaded = sts.load_tables(path, positions=3)
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
    ):
        with pytest.raises(ValueError, match="calibration.json not written: "):
            sts.save_tables(path, bad)
        assert not path.exists()
