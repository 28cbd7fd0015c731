"""Sequential temperature scaling against the oracle, and what a shift adds to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_jax.calibrate import metrics, sts
from tests.calibrate.made_up import records
from tests.oracle import oracle_dir


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


def test_a_shift_repairs_what_no_temperature_can() -> None:
    """Logits too high by 0.6, the same for all: whatever its temperature, one half stays one half. With 40,000 blocks
    the noise of an ECE of 20 bins is about 0.004; at every position the error of the shifted fit is below 0.01."""
    rng = np.random.default_rng(3)
    truth = rng.normal(0.0, 0.7, (40_000, 3))
    accepted = np.cumprod(rng.random(truth.shape) < metrics.sigmoid(truth), axis=1)
    plain = sts.fit(truth + 0.6, accepted)
    found = sts.fit(truth + 0.6, accepted, shifts=sts.SHIFTS)
    assert plain.shift is None and plain.ece_after is not None and plain.ece_after[0] > 0.05
    assert found.shift == pytest.approx(-0.6, abs=0.051)
    assert found.ece_after is not None and (found.ece_after < 0.01).all()
    assert found.ece_before.tolist() == plain.ece_before.tolist(), "of the raw confidences"
    scores = metrics.survival_scores(truth + 0.6, found.temperature, found.shift)
    np.testing.assert_allclose(found.ece_after, metrics.ece(scores, accepted, 20), atol=1e-15)


def test_of_equal_shifts_the_one_nearest_to_nought_wins_and_nought_is_the_papers_fit() -> None:
    """All tie where every probability is 1: the nearest to 0 wins, then the smaller one. With 0 as the only candidate
    nothing is different."""
    assert sts.fit(np.full((2, 1), 50.0), [[1], [1]], shifts=(0.5, -0.5, 0.0)).shift == 0.0
    assert sts.fit(np.full((2, 1), 50.0), [[1], [1]], shifts=(0.5, -0.5)).shift == -0.5
    plain, nought = sts.fit(*records()), sts.fit(*records(), shifts=(0.0,))
    assert nought.shift == 0.0 and nought.temperature.tolist() == plain.temperature.tolist()
    with pytest.raises(ValueError, match=r"shifts: numbers within 100 of 0 expected, got \[nan\]"):
        sts.fit(*records(), shifts=(float("nan"),))
    with pytest.raises(ValueError, match=r"shifts: numbers within 100 of 0 expected, got \[0.0, -101.0\]"):
        sts.fit(*records(), shifts=(0.0, -101.0))
