"""The learning curve of a run that another one began."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import learning_curve
import numpy as np
import pytest
from scipy import stats


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


def test_a_run_that_was_started_again_behind_its_end_has_each_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last line is measured again."""
    folder = run(tmp_path / "run", 0.0)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    command(monkeypatch, "--run", str(folder), "--out", str(tmp_path / "one"))
    points = json.loads((tmp_path / "one.json").read_text())["points"]
    assert [(point["positions"], point["end"]) for point in points] == [(200, False), (400, False), (600, True)]


@pytest.mark.parametrize(
    ("lines", "arguments", "said"),
    [(1, (), "no held-out measurement behind step 0"), (99, ("--rolled-out", "751770"), "invalid rolled_out value")],
)
def test_a_run_without_points_and_points_without_lengths_are_refused(
    lines: int, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = run(tmp_path / "run", 0.0)
    path = folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(SystemExit):
        command(monkeypatch, "--run", str(folder), "--out", str(tmp_path / "one"), *arguments)
    assert said in capsys.readouterr().err


def test_points_on_a_line_give_that_line() -> None:
    """1 + 0.25 log2(x): 0.25 a doubling, 3.5 at 1,024 and no width anywhere. Two points have no interval, and points at
    one place no line."""
    x = [2.0, 8.0, 64.0, 256.0]
    found = learning_curve.fit(x, [1 + 0.25 * np.log2(v) for v in x], 1024.0)
    assert found is not None and found["points"] == 4 and found["per_doubling"] == 0.25 and found["value"] == 3.5
    assert found["per_doubling_interval"] == [0.25, 0.25] and found["interval_of_line"] == [3.5, 3.5]
    assert found["interval_of_point"] == [3.5, 3.5]
    two = learning_curve.fit(x[:2], [1.25, 1.75], 1024.0)
    assert two == {"points": 2, "per_doubling": 0.25, "at": 1024.0, "value": 3.5}
    assert learning_curve.fit([8.0, 8.0], [1.0, 2.0], 9.0) is None and learning_curve.fit([], [], 9.0) is None


def test_intervals_are_those_of_a_regression() -> None:
    """Five points; slope and its standard error by scipy.stats.linregress. Where the points' mean lies, the line is
    t s / sqrt(n) wide to each side, and a single measurement t s sqrt(1 + 1 / n)."""
    at, y = np.arange(1.0, 6.0), np.array([1.0, 1.3, 1.2, 1.6, 1.5])
    found = learning_curve.fit(list(2**at), list(y), 2.0**3)
    assert found is not None
    line, t = stats.linregress(at, y), stats.t.ppf(0.975, 3)
    s = np.sqrt(((y - line.intercept - line.slope * at) ** 2).sum() / 3)
    for name, middle, half in (
        ("per_doubling_interval", line.slope, t * line.stderr),
        ("interval_of_line", y.mean(), t * s / np.sqrt(5)),
        ("interval_of_point", y.mean(), t * s * np.sqrt(1.2)),
    ):
        np.testing.assert_allclose(found[name], [middle - half, middle + half], atol=1e-3)


def test_the_interval_of_the_line_covers_it() -> None:
    """1,000 simulated curves of eight points, carried on two doublings: 95 % of the intervals have the true line in
    them. The standard deviation of the count is 6.9; outside of 950 +- 23 with probability 0.001; the draws are fixed.
    """
    rng, x = np.random.default_rng(3), 2.0 ** np.arange(8)
    truth, covered = 1 + 0.1 * 9, 0
    for noise in rng.normal(0, 0.05, (1000, 8)):
        found = learning_curve.fit(list(x), list(1 + 0.1 * np.log2(x) + noise), 2.0**9)
        assert found is not None
        covered += found["interval_of_line"][0] <= truth <= found["interval_of_line"][1]
    assert 927 <= covered <= 973
