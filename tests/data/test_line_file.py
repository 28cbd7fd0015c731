"""Record files survive a kill in the middle of a line, and never mix two jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.data.line_file import LineFile


def test_a_line_that_was_cut_off_is_dropped_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    file = LineFile(path, {"seed": 1, "nested": {"x": (1, 2)}})
    file.append({"i": 0})
    file.append({"i": 1})
    file.close()
    path.write_bytes(path.read_bytes() + b'{"i": 2, "tok')
    again = LineFile(path, {"seed": 1, "nested": {"x": (1, 2)}})
    assert again.lines == [{"i": 0}, {"i": 1}]
    again.append({"i": 2})
    again.close()
    last = LineFile(path, {"seed": 1, "nested": {"x": (1, 2)}})
    last.close()
    assert last.lines == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_kill_within_the_header_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_bytes(b'{"se')
    file = LineFile(path, {"seed": 1})
    file.close()
    assert file.lines == [] and path.read_text() == '{"seed": 1}\n'


def test_records_of_another_job_are_refused_with_the_differences(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    LineFile(path, {"seed": 1, "decode": {"n": 4}, "same": 0}).close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"b\.jsonl holds .* else: decode\.n: 4 -> 8; seed: 1 -> 2\. Give another"):
        LineFile(path, {"seed": 2, "decode": {"n": 8}, "same": 0})
    assert path.read_bytes() == before


def test_what_an_older_file_does_not_say_is_not_held_against_it(tmp_path: Path) -> None:
    """Only entries that are named as newer; a file that says them is compared."""
    path = tmp_path / "b.jsonl"
    LineFile(path, {"seed": 1}).close()
    file = LineFile(path, {"seed": 1, "weights": "a"}, newer=("weights",))
    file.append({"i": 0})
    file.close()
    with pytest.raises(ValueError, match="rule: None -> 'b'"):
        LineFile(path, {"seed": 1, "weights": "a", "rule": "b"}, newer=("weights",))
    LineFile(tmp_path / "c.jsonl", {"seed": 1, "weights": "a"}).close()
    with pytest.raises(ValueError, match="weights: 'a' -> 'b'"):
        LineFile(tmp_path / "c.jsonl", {"seed": 1, "weights": "b"}, newer=("weights",))


def test_a_broken_line_in_the_middle_is_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"seed": 1}\n{"i": \n{"i": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:2: not valid JSON"):
        LineFile(path, {"seed": 1})
