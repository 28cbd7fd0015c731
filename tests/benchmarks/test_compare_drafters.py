"""Drafters at equal training time: how long a row trains, what is kept, what is refused. Trainer and evaluation are
stand-ins with a known cost, but for one slow test."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compare_drafters
import pytest
import timed_training
from compare_drafters import CompareConfig
from kept_rows import KeptRow
from timed_training import Row, cpu_of_steps

from dspark_jax.data.records import write_records

HERE = Path(__file__).resolve().parent
TRAINING = """
target = "tiny"
[data]
train = "{text}"
heldout = "{text}"
batch = 2
[run]
log_every = 2
[drafter]
layers = 1
target_layer_ids = [0]
mask_token_id = 1
block_size = 3
markov_rank = 4
draft_vocab = 20
"""
ROWS = """
evaluate = "{place}/evaluate.toml"
references = ["long", "short"]
seconds = 0.3
note = "Something else to know."
[[rows]]
name = "long"
config = "{place}/plain.toml"
seconds = 0.6
[[rows]]
name = "bigram"
config = "{place}/bigram.toml"
seconds = 0.6
[[rows]]
name = "short"
config = "{place}/plain.toml"
[[rows]]
name = "wide"
config = "{place}/plain.toml"
set = ["drafter.markov_rank=8"]
"""
EVALUATION = """
target = "tiny"
drafters = []
bootstrap = 50
[[suites]]
name = "a"
path = "a.jsonl"
"""


class World:
    """A comparison of four rows in a folder."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.runs, self.out, self._monkeypatch = place, place / "runs", place / "table", monkeypatch
        self.kept = place / "table_rows"
        text = place / "text"
        write_records(text, [([1, 2, 3], [True] * 3)] * 4, vocab_size=9)
        (place / "plain.toml").write_text(TRAINING.format(text=text))
        (place / "bigram.toml").write_text(TRAINING.format(text=text) + "bigram_start = true\n")
        (place / "evaluate.toml").write_text(EVALUATION)
        (place / "rows.toml").write_text(ROWS.format(place=place))

    def fake(self, **how: Any) -> None:
        """What the stand-in for the trainer does differently."""
        self._monkeypatch.setenv("FAKE_TRAINER", json.dumps(how))

    def run(self, *arguments: str) -> None:
        """The command."""
        files = ["--config", str(self.place / "rows.toml"), "--runs", str(self.runs), "--out", str(self.out)]
        compare_drafters.main([*files, "--threads", "1", *arguments])

    def done(self, name: str) -> dict[str, Any]:
        return json.loads((self.runs / name / "done.json").read_text())

    def sets(self, name: str) -> list[list[str]]:
        """The overrides of every start of a row's training."""
        return [json.loads(line) for line in (self.runs / name / "sets.jsonl").read_text().splitlines()]

    def refused(self, *arguments: str) -> str:
        """The one line with which the command ends."""
        with pytest.raises(SystemExit) as caught:
            self.run(*arguments)
        assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
        return caught.value.code


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(timed_training, "TRAIN", (sys.executable, "-S", str(HERE / "fake_trainer.py")))
    monkeypatch.setattr(compare_drafters, "EVALUATE", (sys.executable, "-S", str(HERE / "fake_evaluation.py")))
    monkeypatch.setattr(timed_training, "POLL_S", 0.004)
    before = signal.getsignal(signal.SIGTERM)
    yield World(tmp_path, monkeypatch)
    signal.signal(signal.SIGTERM, before)


def test_rows_train_for_their_time_and_are_compared_with_those_of_the_same_time(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """5 ms of CPU time a step: 0.6 s are 120 steps or somewhat fewer, 80 behind a bigram start of 0.2 s, which reads
    the records that those steps read. /proc counts in 10 ms, writing the log takes some, and on a busy machine a line
    is seen late: of the 90 ms that a probe times, two fifths less are allowed, and as much again more."""
    world.run()
    done = {name: world.done(name) for name in ("long", "bigram", "short", "wide")}
    wanted = {"long": 120, "bigram": 80, "short": 60, "wide": 60}
    for name, most in wanted.items():
        assert most / 2.0 < done[name]["steps"] < most / 0.6 and done[name]["steps"] % 2 == 0
        start = 0.2 if name == "bigram" else 0.0
        assert done[name]["start_cpu_seconds"] == done[name]["probe_start_seconds"] == start
        fits = (done[name]["seconds"] - start) / done[name]["probe_seconds_per_step"]
        # Whole lines of the log, two steps each; the plan keeps four digits behind the point.
        assert fits * 0.98 - 2.0 < done[name]["steps"] < fits * 1.02
        assert 0.6 < (done[name]["cpu_seconds"] - start) / (done[name]["steps"] * 0.005) < 2.0
        (sets,) = world.sets(name)
        assert f"optim.total_steps={done[name]['steps']}" in sets
        assert f"optim.decay_steps={done[name]['steps'] // 4}" in sets
        read = [x for x in sets if x.startswith("drafter.bigram_records=")]
        assert read == ([f"drafter.bigram_records={done[name]['records']}"] if start else [])
        assert done[name]["records"] == 2 * done[name]["steps"]
    assert not list(world.runs.glob("*-probe")) and (world.kept / "plans.json").is_file()

    result = json.loads(world.out.with_suffix(".json").read_text())
    entries = {entry["name"]: entry for entry in result["runs"]["greedy"]}
    assert {name: entry["reference"] for name, entry in entries.items()} == {
        "long": "long", "bigram": "long", "short": "short", "wide": "short",
    }  # fmt: skip
    assert [name for name, entry in entries.items() if "later_pooled_ratio" in entry] == ["bigram", "wide"]
    assert entries["wide"]["later_pooled_ratio"]["positions"] == [2, 3]
    text = world.out.with_suffix(".md").read_text()
    assert "## greedy, 0.6 CPU seconds\n" in text and "## greedy, 0.3 CPU seconds\n" in text
    assert "Something else to know." in text and f"| wide | {done['wide']['cpu_seconds']:.0f} | " in text
    assert ", ".join(map(str, entries["wide"]["tried"])) in text
    said = capsys.readouterr().out
    assert f"wide: exported to {world.runs}/wide/drafter" in said

    # Nothing is trained again; without their runs the rows come from their files.
    world.run()
    assert all(len(world.sets(name)) == 1 for name in wanted)
    for name in wanted:
        (world.runs / name).rename(world.place / name)
    world.run()
    assert json.loads(world.out.with_suffix(".json").read_text())["runs"] == result["runs"] and not list(
        world.runs.glob("*/done.json")
    )


def test_a_row_that_goes_on_counts_neither_compilation_nor_what_was_lost(world: World) -> None:
    """Compilation takes 0.4 s at each of three starts (probe, death at step 60, end); the checkpoint lags ten steps
    behind the log. The steps alone cost 5 ms each."""
    world.fake(compile_s=0.4, die_at=60, unsaved=10)
    assert "training ended with status 1" in world.refused("--only", "long")
    assert not (world.runs / "long" / "done.json").exists()
    world.run("--only", "long")
    done = world.done("long")
    assert len(world.sets("long")) == 2 and world.sets("long")[0] == world.sets("long")[1]
    assert 120 / 1.6 < done["steps"] < 120 / 0.85
    assert 0.85 < done["cpu_seconds"] / (done["steps"] * 0.005) < 1.6  # 0.4 s more would be 1.7 and above


def test_seconds_of_steps_come_from_their_lines(tmp_path: Path) -> None:
    """Two starts. Steps 4 to 8 cost 1 s each; the second start sees 8 and then 12, at 3 s a step. The eight that were
    timed cost 16 s, so the twelve 24."""
    assert cpu_of_steps(tmp_path, 12) is None
    lines = [None, [4, 100.0], [8, 104.0], None, [8, 50.0], [12, 62.0]]
    (tmp_path / "cpu_seconds.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + "[16, 9")
    assert cpu_of_steps(tmp_path, 12) == 24.0


def test_a_probe_without_two_lines_of_the_log_is_refused(world: World) -> None:
    for every in (20, 21):
        line = world.refused("--only", "long", "--set-all", f"run.log_every={every}")
        assert line == "long: fewer than two lines of the log in 20 steps; lower run.log_every"


def test_too_little_time_is_refused(world: World) -> None:
    text = (world.place / "rows.toml").read_text()
    (world.place / "rows.toml").write_text(text.replace("seconds = 0.3", "seconds = 0.05"))
    assert "wide: 0.05 CPU seconds are too few" in world.refused("--only", "wide")


def other_settings(world: World) -> None:
    path = world.place / "plain.toml"
    path.write_text(path.read_text().replace("layers = 1", "layers = 2"))


def other_text(world: World) -> None:
    write_records(world.place / "text", [([1, 2, 4], [True] * 3)] * 4, vocab_size=9)


def other_time(world: World) -> None:
    path = world.place / "rows.toml"
    path.write_text(path.read_text().replace("seconds = 0.3", "seconds = 0.4"))


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (other_settings, (), "settings.drafter.layers: 1 -> 2"),
        (other_text, (), "text: '"),
        (other_time, (), "seconds: 0.3 -> 0.4"),
        (None, ("--set-all", "loss.decay=2.0"), "settings.loss.decay: 4.0 -> 2.0"),
        (None, ("--threads", "2"), "threads: 1 -> 2"),
    ],
)
def test_rows_of_other_settings_are_refused_wherever_they_come_from(
    world: World, change: Callable[[World], None] | None, arguments: tuple[str, ...], said: str
) -> None:
    """A finished run, a kept row, a plan: each is refused with the difference and what to delete."""
    world.run("--only", "short")
    if change is not None:
        change(world)
    line = world.refused("--only", "short", *arguments)
    assert line.startswith(f"{world.runs / 'short'} was trained otherwise (") and said in line and "delete it" in line
    (world.runs / "short").rename(world.place / "away")
    line = world.refused("--only", "short", *arguments)
    assert line.startswith(f"{world.kept / 'short.json'} was trained otherwise (") and said in line
    (world.kept / "short.json").unlink()
    line = world.refused("--only", "short", *arguments)
    assert line.startswith(f"{world.kept / 'plans.json'}: short was probed otherwise (") and said in line


def test_settings_that_change_no_training_are_not_compared(world: World) -> None:
    """Another place of the same text, another rhythm, and a setting that a kept row did not know."""
    world.run("--only", "short")
    (world.runs / "short").rename(world.place / "away")
    (world.place / "text").rename(world.place / "moved")
    path = world.kept / "short.json"
    path.write_text(path.read_text().replace('"drafter.bigram_start": false, ', ""))
    world.run("--only", "short", "--set-all", f"data.train={world.place / 'moved'}", "--set-all", "run.keep=9")
    assert not (world.runs / "short").exists()


def test_a_kept_row_stays_in_the_table_while_its_new_run_is_unfinished(world: World) -> None:
    world.run("--only", "short,wide")
    (world.runs / "wide" / "done.json").unlink()
    world.run("--only", "short")
    names = [entry["name"] for entry in json.loads(world.out.with_suffix(".json").read_text())["runs"]["greedy"]]
    assert names == ["short", "wide"]


def test_an_evaluation_that_fails_ends_in_one_line_with_the_remedy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EVALUATION", "2")
    line = world.refused("--only", "short")
    assert line.startswith("the evaluation ended with status 2") and "records/*/NAME.jsonl" in line


def test_rows_of_other_drafts_or_other_text_are_not_compared(world: World) -> None:
    world.run("--only", "short,wide")
    for name in ("short", "wide"):
        (world.runs / name).rename(world.place / name)
    row = KeptRow.load(world.kept / "wide.json")
    dataclasses.replace(row, drafts=7).save(world.kept)
    assert "was decoded with 7 drafts a block, not 3" in world.refused("--only", "short")
    dataclasses.replace(row, trained={**row.trained, "text": "0" * 16}).save(world.kept)
    assert "text: '0000000000000000' -> " in world.refused("--only", "short")
    # Where the text is not at hand, the rows are still compared with each other.
    (world.place / "text").rename(world.place / "gone")
    assert "trained on different text" in world.refused("--only", "short")


def gone(pid: int, patience: int = 1000) -> bool:
    """Has ended, within so many hundredths of a second."""
    for _ in range(patience):
        if (
            not Path(f"/proc/{pid}").exists()
            or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return True
        time.sleep(0.01)
    return False


def test_sigterm_ends_the_training_process_too(world: World) -> None:
    """The stand-in sends the signal itself when it has written ten lines, and would train for another minute."""
    world.run("--plan", "--only", "short")
    plans = json.loads((world.kept / "plans.json").read_text())
    plans["short"]["steps"] = 12_000
    (world.kept / "plans.json").write_text(json.dumps(plans))
    world.fake(signal_at=20)
    with pytest.raises(SystemExit) as caught:
        world.run("--only", "short")
    assert caught.value.code == 128 + signal.SIGTERM
    assert gone(int((world.runs / "short" / "pid").read_text()))
    assert not (world.runs / "short" / "done.json").exists()


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = (
        "import os, sys, tethered\n"
        "child = tethered.start([sys.executable, '-S', '-c', 'import time; time.sleep(60)'],\n"
        "                       cores=sorted(os.sched_getaffinity(0))[:1], cwd='.', env=os.environ)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    place = Path(compare_drafters.__file__).parent
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=place, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    begun = Path(f"/proc/{child}/cmdline")
    for _ in range(1000):  # until it has become the command
        text = begun.read_bytes()
        if b"time.sleep" in text and b"tethered" not in text:
            break
        time.sleep(0.01)
    assert not gone(child, patience=1)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(child)


def test_every_training_time_has_one_reference(tmp_path: Path) -> None:
    rows = (Row("a", tmp_path, seconds=3.0), Row("b", tmp_path), Row("c", tmp_path))
    config = CompareConfig(tmp_path, rows, ("a", "b"), seconds=2.0)
    assert [config.reference(x) for x in (3.0, 2.0)] == ["a", "b"]
    for references, said in (
        (("a",), "rows of 2 CPU seconds need one, found 0"),
        (("a", "x"), "references among them"),
    ):
        with pytest.raises(ValueError, match=said):
            CompareConfig(tmp_path, rows, references, seconds=2.0)


@pytest.mark.slow
def test_a_real_run_is_probed_trained_and_timed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model of the training tests, with a bigram start over the records that its steps read."""
    monkeypatch.setattr(timed_training, "TRAIN", (sys.executable, str(HERE / "tiny_trainer.py")))
    text = (world.place / "rows.toml").read_text().replace("seconds = 0.6", "seconds = 2.0")
    (world.place / "rows.toml").write_text(text)
    from tests.train import tiny_run

    tiny = tiny_run.records(world.place / "tiny", 4000)
    shape = ["data.length=20", "data.anchors=6", "data.widths=[3, 1, 2]", "data.heldout_batches=1"]
    shape += ["data.heldout_anchors=4", "data.heldout_widths=[3]", f"data.train={tiny}", f"data.heldout={tiny}"]
    world.run("--only", "bigram", *(part for x in shape for part in ("--set-all", x)))
    done, folder = world.done("bigram"), world.runs / "bigram"
    config = json.loads((folder / "config.json").read_text())
    assert config["drafter"]["bigram_records"] == done["records"] == 2 * done["steps"]
    assert done["start_cpu_seconds"] > 0 and done["cpu_seconds"] > done["start_cpu_seconds"]
    assert (folder / "drafter" / "model.safetensors").is_file() and (folder / "lock").is_file()
