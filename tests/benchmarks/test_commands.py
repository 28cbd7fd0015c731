"""The two commands of serving under load, from arguments to files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import bench_load
import pytest
import simulate_serving

from dspark_jax.schedule import StepTimeTable


def test_curves_are_simulated_and_written(tmp_path: Path) -> None:
    """On a flat table speculation pays, and the adaptive arm keeps up with the best fixed one; code gets more drafts
    than chat."""
    tokens = list(range(1, 33))
    table = StepTimeTable(
        tokens, [10.0 + 0.5 * t for t in tokens], draft_ms=1.0, device="d", machine="m", model_hash="x"
    )
    table.save(tmp_path / "table.json")
    out = tmp_path / "curves"
    arguments = ["--step-time", str(tmp_path / "table.json"), "--loads", "1,4", "--fixed", "1,3", "--rates", "2"]
    arguments += ["--poisson-seconds", "3", "--request-cycles", "400", "--switch-users", "4", "--switch-runs", "3"]
    arguments += ["--out", str(out)]
    assert simulate_serving.main(["curves", *arguments]) == 0
    result = json.loads(out.with_suffix(".json").read_text())
    assert {row["arm"] for row in result["arms"]} == {"none", "MTP-1", "fixed 1", "fixed 3", "threshold", "adaptive"}
    assert all(bar["ratio"] > 0.9 for bar in result["bars"])
    assert all(change["budget_before"] > change["budget_after"] for change in result["switch"])
    assert [row["rate"] for row in result["poisson"]] == [2.0] * 6
    assert "| adaptive | 4 |" in out.with_suffix(".md").read_text()
    # Machines for measuring have no matplotlib; there the figure alone is left out.
    if importlib.util.find_spec("matplotlib") is None:
        assert not out.with_suffix(".png").exists()
    else:
        assert out.with_suffix(".png").stat().st_size > 1000


def test_more_drafts_than_a_block_has_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    StepTimeTable([1, 8], [10.0, 11.0], draft_ms=1.0).save(tmp_path / "table.json")
    arguments = ["curves", "--step-time", str(tmp_path / "table.json"), "--out", str(tmp_path / "curves")]
    for wrong in ("1,9", "0"):
        assert simulate_serving.main([*arguments, "--fixed", wrong]) == 2
        said = capsys.readouterr()
        line = f"simulate_serving: --fixed: {wrong[-1]} drafts, but a block of these traces has 1 to 7\n"
        assert said.err == line and not said.out


@pytest.mark.slow
def test_a_load_run_goes_on_where_it_was_and_is_simulated(tmp_path: Path) -> None:
    """Tiny random models, cells of a fifth of a second: all cells are there, a second call with the same settings runs
    none, other settings are refused; the simulation reads what was written."""
    out = tmp_path / "load"
    arguments = [
        "--target",
        "tiny",
        "--seconds",
        "0.2",
        "--warm-seconds",
        "0.05",
        "--fixed",
        "",
        "--concurrency",
        "1,2",
    ]
    arguments += ["--shown", "", "--rounds", "2", "--traces", "4", "--trace-users", "2", "--profile-seconds", "1"]
    arguments += ["--max-new-tokens", "12", "--max-model-len", "64", "--max-programs", "9"]
    arguments += ["--compilation-cache-dir", "", "--out", str(out)]
    assert bench_load.main(arguments) == 0
    lines = Path(f"{out}.jsonl").read_text()
    assert sum("arm" in json.loads(line) for line in lines.splitlines()) == 2 * 2 * 3
    assert all(json.loads(line).get("late_compiles", 0) == 0 for line in lines.splitlines())
    assert bench_load.main(arguments) == 0 and Path(f"{out}.jsonl").read_text() == lines
    assert bench_load.main([*arguments, "--seed", "1"]) == 2
    assert simulate_serving.main(["validate", "--load", str(out), "--seconds", "5", "--out", str(tmp_path / "v")]) in (
        0,
        1,
    )
    rows = json.loads((tmp_path / "v.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["simulated"] > 0 for row in rows)
