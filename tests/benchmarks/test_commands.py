"""The two commands of serving under load, from arguments to files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import ClassVar

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


@pytest.mark.parametrize(
    ("loads", "users", "said"),
    [("1,3", 2, "--loads: 3 requests at once"), ("2", 3, "--switch-users: 3 requests at once"), ("2", 0, "--switch-u")],
)
def test_loads_that_the_table_does_not_know_are_refused_before_anything_runs(
    loads: str, users: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of two slots would have told three requests the price of two."""
    path = tmp_path / "table.json"
    StepTimeTable([2, 32], [10.0, 11.0], slots=2, draft_ms=1.0).save(path)
    arguments = ["curves", "--step-time", str(path), "--loads", loads, "--switch-users", str(users), "--fixed", "1"]
    assert simulate_serving.main([*arguments, "--out", str(tmp_path / "curves")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"simulate_serving: {said}") and not captured.out


ARGUMENTS = ["--target", "tiny", "--fixed", "", "--concurrency", "1,2", "--shown", "", "--rounds", "2"]


class ScriptedRun:
    """Stands in for models and engines; a number at which it is killed, and what it was asked for."""

    asked: ClassVar[list[object]] = []
    killed_at: ClassVar[int | None] = None
    hashes: ClassVar[dict[str, str]] = {}

    def __init__(self, args: object) -> None:
        self.asked.clear()

    def weights(self) -> dict[str, str]:
        return {"target": "t", "drafter": "d", "calibration": "c", **self.hashes}

    def build(self, arms: object, fresh: bool) -> None:
        self.asked.append(("build", fresh))

    def measure(self, number: int) -> dict[str, object]:
        self.asked.append(("measure", number))
        steps = {name: [["plain", 1, 1, 5.0 + number]] for name in ("none", "threshold", "adaptive")}
        return {"round": number, "step_times": steps, "prompt_ms": dict.fromkeys(steps, 3.0 + number)}

    def cell(self, number: int, users: int, arm: str) -> dict[str, object]:
        if len(self.asked) == self.killed_at:
            raise KeyboardInterrupt
        self.asked.append((number, users, arm))
        return {
            "round": number, "concurrency": users, "arm": arm, "seconds": 1.0, "tokens": 90, "blocks": [10] * 9,
            "finished": 1, "load_average": [0.0, 0.0], "late_compiles": 0,
        }  # fmt: skip

    def say(self, line: str) -> None:
        pass


def cells_of(path: Path) -> list[tuple[int, int, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(c["round"], c["concurrency"], c["arm"]) for c in lines if "arm" in c]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedRun]:
    monkeypatch.setattr(bench_load, "Run", ScriptedRun)
    monkeypatch.setattr(bench_load, "enable_compilation_cache", lambda directory, say: None)
    monkeypatch.setattr(ScriptedRun, "killed_at", None)
    return ScriptedRun


def test_a_run_that_was_killed_within_a_line_goes_on_and_ends_with_every_cell_once(
    tmp_path: Path, scripted: type[ScriptedRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "load", tmp_path / "load.jsonl"
    arguments = [*ARGUMENTS, "--out", str(out)]
    monkeypatch.setattr(scripted, "killed_at", 6)  # what was built and measured, and four cells
    with pytest.raises(KeyboardInterrupt):
        bench_load.main(arguments)
    text = log.read_text()
    log.write_text(text[:-20])
    monkeypatch.setattr(scripted, "killed_at", None)
    assert bench_load.main(arguments) == 0
    assert "the last line is not whole and is dropped" in capsys.readouterr().err
    # It decides by the old step times, and measures those of the round that has not begun.
    assert scripted.asked[0] == ("build", False)
    assert [asked for asked in scripted.asked if asked[0] == "measure"] == [("measure", 1)]  # type: ignore[index]
    found = cells_of(log)
    assert len(found) == len(set(found)) == 2 * 2 * 3 and log.read_text().startswith(text[: text.rindex("\n", 0, -1)])
    result = json.loads((tmp_path / "load.json").read_text())
    assert len(result["arms"]) == 6 and result["prompt_ms"]["none"] == 3.5
    assert StepTimeTable.load(tmp_path / "load_step_times" / "adaptive.json").ms(1) == 5.5
    assert "| none | 90 | 90 |" in (tmp_path / "load.md").read_text()


def test_other_code_weights_calibration_or_cores_are_not_mixed_into_a_run(
    tmp_path: Path, scripted: type[ScriptedRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ARGUMENTS, "--out", str(tmp_path / "load")]
    monkeypatch.setattr(scripted, "killed_at", 3)
    with pytest.raises(KeyboardInterrupt):
        bench_load.main(arguments)
    before = (tmp_path / "load.jsonl").read_text()
    monkeypatch.setattr(scripted, "hashes", {"drafter": "other"})
    assert bench_load.main(arguments) == 2
    said = capsys.readouterr().err
    assert "drafter 'd' -> 'other': bring the drafter's old weights back, or choose another --out" in said
    monkeypatch.setattr(scripted, "hashes", {})
    here = bench_load.environment()
    monkeypatch.setattr(bench_load, "environment", lambda: {**here, "commit": "other", "cores": 77})
    assert bench_load.main(arguments) == 2
    said = capsys.readouterr().err
    assert "-> 'other'; cores" in said and "-> 77: check out that commit" in said and "taskset" in said
    assert (tmp_path / "load.jsonl").read_text() == before


def test_a_damaged_line_is_named_and_prompts_that_are_missing_begin_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load"
    arguments = [*ARGUMENTS, "--compilation-cache-dir", "", "--out", str(out)]
    assert bench_load.main([*arguments, "--prompts", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err and not list(tmp_path.iterdir())
    for text, wrong in (('{"settings": {}}\n{"arm": \n{}\n', 2), ('{"round": 0}\n', 1), ("[1]\n", 1)):
        Path(f"{out}.jsonl").write_text(text)
        assert bench_load.main(arguments) == 2
        assert f"load.jsonl, line {wrong} is " in capsys.readouterr().err


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
    arguments += ["--measure-seconds", "0.1"]
    arguments += ["--max-new-tokens", "12", "--max-model-len", "64", "--max-programs", "9"]
    arguments += ["--compilation-cache-dir", "", "--out", str(out)]
    assert bench_load.main(arguments) == 0
    lines = Path(f"{out}.jsonl").read_text()
    assert sum("arm" in json.loads(line) for line in lines.splitlines()) == 2 * 2 * 3
    assert all(json.loads(line).get("late_compiles", 0) == 0 for line in lines.splitlines())
    assert bench_load.main(arguments) == 0 and Path(f"{out}.jsonl").read_text() == lines
    decided = (tmp_path / "load_step_times" / "adaptive_start.json").read_text()
    kept = lines.splitlines(keepends=True)[:-2]  # a kill within the second last line
    Path(f"{out}.jsonl").write_text("".join(kept)[:-9])
    assert bench_load.main(arguments) == 0 and Path(f"{out}.jsonl").read_text().startswith("".join(kept[:-1]))
    assert len(set(cells_of(Path(f"{out}.jsonl")))) == len(cells_of(Path(f"{out}.jsonl"))) == 2 * 2 * 3
    assert (tmp_path / "load_step_times" / "adaptive_start.json").read_text() == decided
    assert bench_load.main([*arguments, "--seed", "1"]) == 2
    assert simulate_serving.main(["validate", "--load", str(out), "--seconds", "5", "--out", str(tmp_path / "v")]) in (
        0,
        1,
    )
    rows = json.loads((tmp_path / "v.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["simulated"] > 0 for row in rows)
