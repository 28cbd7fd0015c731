"""The learning curve of a run that another one began."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import learning_curve
import pytest


def run(folder: Path, before: float) -> Path:
    """Metrics of six steps of 100 positions; the rate falls at the end."""
    held = {"width_3": {"blocks": 9, "tau": 1.2, "greedy": 1.1}}
    lines: list[dict[str, Any]] = [{"heldout": held, "step": 0, "positions": before}]
    for step in range(1, 7):
        lines.append({"step": step, "positions": before + 100.0 * step, "learning_rate": 1e-3 if step < 5 else 1e-4})
        if step % 2 == 0:
            lines.append({"heldout": held, "step": step, "positions": before + 100.0 * step})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["learning_curve.py", *arguments])
    learning_curve.main()


def test_points_of_the_run_that_it_started_from_come_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 0 measures what the earlier run ended with: it is no new point. A file that reaches past the beginning, or
    is none, is refused."""
    first, second = run(tmp_path / "first", 0.0), run(tmp_path / "second", 600.0)
    one, two = tmp_path / "one", tmp_path / "two"
    command(monkeypatch, "--run", str(first), "--out", str(one))
    command(monkeypatch, "--run", str(second), "--out", str(two), "--earlier", str(one.with_suffix(".json")))
    points = json.loads(two.with_suffix(".json").read_text())["points"]
    assert [point["positions"] for point in points] == [200, 400, 600, 800, 1000, 1200]
    assert [point["end"] for point in points] == [False, False, True, False, False, True]

    for earlier, words in ((two.with_suffix(".json"), "ends at 1200"), (second / "metrics.jsonl", "no result of this")):
        with pytest.raises(SystemExit):
            command(monkeypatch, "--run", str(second), "--out", str(two), "--earlier", str(earlier))
        assert words in capsys.readouterr().err
