"""Acceptance traces: recorded texts, anchors, files, and the made-up ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from serving.synthetic import spread_of, synthetic
from serving.traces import Traces, from_texts


def small() -> Traces:
    survival = np.array([[0.9, 0.45], [0.8, 0.8], [0.5, 0.0], [1.0, 0.5]], np.float32)
    return Traces(survival, np.array([2, 1, 1, 0], np.int16), np.array([0, 3, 4]), ("a", "b"), np.array([1.0, 2.0]))


def test_accepted_drafts_are_those_that_the_text_repeats_without_a_gap() -> None:
    """Text 5 6 7 8. Behind 5 the drafts 6 7 are both right; behind 6 the first is wrong, so the second does not count;
    behind 7 the text ends after the first."""
    drafts = np.array([[6, 7], [9, 8], [8, 9]])
    found = from_texts([[5, 6, 7, 8]], [drafts], [np.full((3, 2), 0.5)], ["x"], np.ones(2))
    assert found.accepted.tolist() == [2, 0, 1]
    assert found.starts.tolist() == [0, 3]


def test_anchors_are_the_rows_that_are_passed_through() -> None:
    """With whole blocks the first text of three goes in one cycle, with one draft in two, without drafts in three."""
    assert small().anchors(2).tolist() == [0, 3]
    assert small().anchors(1).tolist() == [0, 2, 3]
    assert small().anchors(0).tolist() == [0, 1, 2, 3]


def test_raw_confidences_undo_products_and_calibration() -> None:
    """Survivals 0.9, 0.45 are conditional 0.9 and 0.5; a temperature of 2 made sigmoid(l / 2) of sigmoid(l)."""
    raw = small().conditional()
    assert raw[0] == pytest.approx([0.9, 0.5], abs=1e-5)
    assert raw[1, 1] == pytest.approx(1.0, abs=1e-5)
    assert raw[3, 1] == pytest.approx(0.5, abs=1e-5)
    shifted = dataclasses.replace(small(), shift=0.5)
    # 0.5 = sigmoid((l + 0.5) / 2) is l = -0.5; texts that are chosen keep the shift.
    assert shifted.conditional()[0, 1] == pytest.approx(1 / (1 + np.exp(0.5)), abs=1e-5)
    assert shifted.of("a").shift == 0.5


def test_files_keep_traces_and_other_files_are_refused_by_name(tmp_path: Path) -> None:
    dataclasses.replace(small(), shift=-0.5).save(tmp_path / "t.npz")
    again = Traces.load(tmp_path / "t.npz")
    assert again.accepted.tolist() == [2, 1, 1, 0] and again.kinds == ("a", "b")
    assert again.survival == pytest.approx(small().survival, abs=1e-3) and again.shift == -0.5
    with np.load(tmp_path / "t.npz") as file:
        np.savez(tmp_path / "t.npz", **{name: file[name] for name in file if name != "shift"})
    assert Traces.load(tmp_path / "t.npz").shift == 0.0, "of a version that knew none"
    np.savez(tmp_path / "other.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match="other.npz"):
        Traces.load(tmp_path / "other.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.npz", "t.npz"]  # written whole, by a rename
    whole = (tmp_path / "t.npz").read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut.npz: no acceptance traces, or cut off"):
            Traces.load(tmp_path / "cut.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": np.array([2, 2, 2, 0], np.int16)}, "accepted"),
        ({"survival": np.array([[0.1, 0.2]] * 4, np.float32)}, "survival"),
        ({"starts": np.array([0, 0, 4])}, "without rows"),
        ({"kinds": ("a",)}, "starts"),
    ],
)
def test_traces_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(small(), name) for name in ("survival", "accepted", "starts", "kinds", "temperature")}
    with pytest.raises(ValueError, match=message):
        Traces(**{**fields, **changes})  # type: ignore[arg-type]


def test_texts_of_a_kind_stay_whole() -> None:
    found = small().of("b")
    assert found.accepted.tolist() == [0] and found.starts.tolist() == [0, 1]
    with pytest.raises(ValueError, match="code"):
        small().of("code")


def test_made_up_traces_have_the_acceptance_that_was_asked_for() -> None:
    """By position, given the positions before; 100 texts of 80 tokens, so a standard error below 0.01 with texts that
    are alike in themselves: 0.05 is five of them, and the seed is fixed. Survivals are calibrated: their mean at the
    last position is the share of blocks accepted in whole."""
    wanted = (0.8, 0.7, 0.6)
    found = synthetic({"code": wanted}, texts=100, tokens=80, seed=4)
    assert found.position_acceptance() == pytest.approx(wanted, abs=0.05)
    inner = found.left() > 3  # the end of a text accepts nothing beyond it
    assert found.survival[inner, 2].mean() == pytest.approx((found.accepted[inner] == 3).mean(), abs=0.03)


def test_the_spread_of_texts_is_found_again() -> None:
    """The logit of a text's own acceptance spreads about as its shift, which the easiness of tokens flattens; without
    any shift none is found beyond sampling error and the run of easy stretches."""
    wide = spread_of(synthetic({"x": (0.6,)}, texts=200, tokens=200, spread=1.5, seed=5))
    none = spread_of(synthetic({"x": (0.6,)}, texts=200, tokens=200, spread=0.0, seed=5))
    assert none < 0.25 < 0.8 < wide < 1.5
