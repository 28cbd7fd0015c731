"""``scripts/train_within.py``: a run that ends, decayed, within its time. A stand-in of known cost trains."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark_jax.config_toml import load_toml
from dspark_jax.data.records import Records, write_records
from dspark_jax.train.config import TrainConfig, fitted
from dspark_jax.train.read_text import ReadText, said_of_training, texts_read

ROOT = Path(__file__).resolve().parents[2]
STANDIN = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for name in ("config", "out", "export-only"):
    parser.add_argument("--" + name, type=pathlib.Path)
parser.add_argument("--set", action="append", default=[])
args = parser.parse_args()
values = dict(x.split("=") for x in args.set)
step_s, first_s = json.loads(args.config.with_name("speed.json").read_text())
saved = args.out / "checkpoints"
(args.out / "drafter").mkdir(parents=True, exist_ok=True)
steps = sorted(int(p.name) for p in saved.glob("[0-9]*"))
step = steps[-1] if steps else 0

def export():
    text = json.dumps({"training": {"steps": step, "records": step, "positions": step}})
    (args.out / "drafter" / "config.json").write_text(text)

def keep():
    (saved / str(step)).mkdir(parents=True, exist_ok=True)

if args.export_only:
    export()
    sys.exit()
with open(args.out / "starts.jsonl", "a") as file:
    file.write(json.dumps(values) + "\\n")
if first_s < 0:
    sys.exit(-first_s)
every, begun = int(values["run.log_every"]), time.monotonic()
time.sleep(first_s if step == 0 else 0)
while step < int(values["optim.total_steps"]):
    time.sleep(step_s)
    step += 1
    if step % every == 0:
        line = {"step": step, "seconds_per_step": (time.monotonic() - begun) / every}
        with open(args.out / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
        begun = time.monotonic()
        keep()
keep()
export()
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, its trainer replaced; a configuration and 300 steps of text."""
    spec = importlib.util.spec_from_file_location("train_within_script", ROOT / "scripts" / "train_within.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "standin.py").write_text(STANDIN)
    monkeypatch.setattr(module, "TRAIN", (sys.executable, "-S", str(tmp_path / "standin.py")))
    write_records(tmp_path / "text", [([1, 2, 3], [True] * 3)] * 300, vocab_size=9)
    text = f'target = "t"\n[data]\ntrain = "{tmp_path / "text"}"\nheldout = "{tmp_path / "text"}"\nbatch = 1\n'
    text += '[optim]\nschedule = "wsd"\n[drafter]\nlayers = 1\ntarget_layer_ids = [0]\n'
    (tmp_path / "c.toml").write_text(text)
    (tmp_path / "speed.json").write_text("[0.02, 0.5]")
    return module


def run(script: ModuleType, place: Path, *arguments: str) -> tuple[int, float]:
    """Exit status and seconds of the command."""
    begun = time.monotonic()
    status = script.main(["--config", str(place / "c.toml"), "--out", str(place / "run"), *arguments])
    return status, time.monotonic() - begun


class Clock:
    """A clock that only training moves: 0.3 s a start, half a second that compiles the first step, 20 ms a step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.starts: list[dict[str, str]] = []

    def monotonic(self) -> float:
        return self.now

    def train(self, config: Path, out: Path, changes: Sequence[str], until: float) -> bool:
        """In the place of the script's own ``train``."""
        values = dict(change.split("=") for change in changes)
        step = int(self.starts[-1]["optim.total_steps"]) if self.starts else 0
        self.starts.append(values)
        every, begun = int(values["run.log_every"]), self.now + 0.3
        self.now = begun + (0.0 if step else 0.5)
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "metrics.jsonl", "a") as file:
            while step < int(values["optim.total_steps"]):
                self.now, step = self.now + 0.02, step + 1
                if step % every == 0:
                    line = {"step": step, "seconds_per_step": (self.now - begun) / every}
                    file.write(json.dumps(line) + "\n")
                    begun = self.now
        (out / "drafter").mkdir(exist_ok=True)
        training = {"steps": step, "records": step, "positions": step}
        (out / "drafter" / "config.json").write_text(json.dumps({"training": training}))
        return self.now <= until


def test_a_run_ends_decayed_within_its_time(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In four seconds: more than 120 steps, and fewer than the 175 that would fit if starting took no time. The second
    stretch goes on in the same run and ends a quarter later than its rate begins to fall."""
    clock = Clock()
    monkeypatch.setattr(script, "time", clock)
    monkeypatch.setattr(script, "train", clock.train)
    status, _ = run(script, tmp_path, "--seconds", "4", "--probe", "10")
    assert status == 0 and clock.now < 4
    first, second = clock.starts
    assert (first["optim.total_steps"], first["optim.decay_steps"]) == ("10", "0")
    total = int(second["optim.total_steps"])
    assert 120 < total < 175 and int(second["optim.decay_steps"]) == total // 4
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["decayed"] and summary["steps"] == total and summary["text_left"] == 300 - total


def test_a_run_ends_where_its_text_does(script: ModuleType, tmp_path: Path) -> None:
    """With 275 records passed over there are 25 steps, however much time there is."""
    status, _ = run(script, tmp_path, "--seconds", "60", "--probe", "10", "--set", "data.first=275")
    assert status == 0
    last = json.loads((tmp_path / "run" / "starts.jsonl").read_text().splitlines()[-1])
    assert last["optim.total_steps"] == "25"
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
    status, _ = run(script, tmp_path, "--seconds", "60", "--probe", "10", "--set", "data.first=290")
    assert status == 2


def test_a_run_that_got_slower_is_stopped_and_exported(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are planned at a tenth of what they cost: stopped at the end of the time, and said so. Also where
    SIGINT is ignored, as in what a shell began in the background."""
    monkeypatch.setattr(script, "steps_in", lambda *given: 290)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, took = run(script, tmp_path, "--seconds", "3", "--probe", "10")
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert status == 3 and 3 <= took < 10 and "3 s were not enough for the rate to fall" in said.err
    summary = json.loads(said.out.splitlines()[-1])
    assert not summary["decayed"] and 10 <= summary["steps"] < 290


def test_time_for_no_checkpoint_is_said(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "speed.json").write_text("[0.02, 30]")
    status, _ = run(script, tmp_path, "--seconds", "0.7")
    assert status == 3 and "0.7 s were over before the first checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("status", [2, 3])
def test_what_training_refuses_or_is_stopped_by_ends_the_command_likewise(
    script: ModuleType, tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "speed.json").write_text(f"[0.02, -{status}]")
    assert run(script, tmp_path, "--seconds", "20")[0] == status
    assert f"training ended with status {status}, for the reason above" in capsys.readouterr().err


def test_steps_are_planned_from_what_the_probe_showed(script: ModuleType) -> None:
    """Ten steps in 40 s: 2 s each, 12 s of them compiling, 8 s around them. Of 114 s, 100 are for steps (a compilation
    counts half when it comes from the cache): 95 with the margin, 47 more steps. No time left: the probed ones."""
    lines: list[dict[str, Any]] = [{"step": 2, "seconds_per_step": 8.0}]
    lines += [{"step": step, "seconds_per_step": 2.0} for step in (4, 6, 8, 10)]
    assert script.steps_in(114.0, 10, lines, 40.0) == 57
    assert script.steps_in(5.0, 10, lines, 40.0) == 10
    with pytest.raises(ValueError, match="fewer than two lines of the log in 10 steps"):
        script.steps_in(114.0, 10, lines[:1], 40.0)


def test_a_drafter_is_continued_behind_what_it_has_read_of_this_text(script: ModuleType, tmp_path: Path) -> None:
    """Of its last text or an earlier one; a text that it has not read begins at its beginning. A drafter that does not
    say which text passes over as many records; one that says nothing is refused."""
    config = tmp_path / "c.toml"
    data = fitted(load_toml(config, TrainConfig, [])).data
    records = Records(data.train)
    known = ReadText(records, records.usable(data.length, data.least_learnt), data).identity(12)
    other = {**known, "text": "another", "records": 5}

    def first(training: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"training": training}))
        name, at, warm = script.continued(str(tmp_path), config, [])
        assert (name, warm) == (f"drafter.start_from={tmp_path}", "optim.warmup_steps=10")
        return str(at)

    assert first(known) == "data.first=12" and first({**other, "earlier": [known]}) == "data.first=12"
    assert first({"records": 7}) == "data.first=7" and first(other) == "data.first=0"
    with pytest.raises(ValueError, match="does not say how many records it has seen"):
        first({})


def test_the_shipped_drafter_says_which_texts_it_has_read() -> None:
    """With what a later run needs to know them again."""
    said = said_of_training("smollm2-135m-instruct-dspark")
    assert [text["records"] for text in texts_read(said)] == [said["records"], 6840]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "optim.schedule=cosine"], 'optim.schedule must be "wsd"'),
        (["--set", "data.first=295"], "there is text for 5 steps, but the probe alone takes 20; bring more text"),
        (["--set", "data.train=nowhere"], "nowhere: no token records here"),
        (["--start-from", "nobody"], "nobody: no such directory"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    script: ModuleType, tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = run(script, tmp_path, "--seconds", "9", *arguments)
    assert status == 2 and said in capsys.readouterr().err
