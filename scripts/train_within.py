"""Trains a drafter within a time, learning rate decayed at its end:

    python scripts/train_within.py --seconds 400 --config configs/train/smollm2_dspark.toml --out runs/short \
        --start-from smollm2-135m-instruct-dspark

First ``--probe`` steps at a constant rate say what a step costs, and a start; from that follows how many steps fit into
what is left, a quarter of them with a falling learning rate (``wsd``). ``scripts/train.py`` trains both stretches in
one run; it ends saved, measured and exported to ``OUT/drafter``. Text is not repeated: where it does not suffice, the
run ends earlier. Where the time is over all the same, the run is stopped, its last checkpoint exported, and the summary
says ``"decayed": false``.

``--start-from`` continues a drafter: behind the records of the same text that its config.json says it has seen, from
the beginning of a text that it has not seen; with a warm-up of ten steps.

Exit status: 0 done; 2 refused; 3 the time was over before the rate had fallen, or training stopped (scripts/train.py).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.checkpoint.drafter_files import read_config
from dspark_jax.command_line import exit_status, folder_parser
from dspark_jax.config_toml import load_toml
from dspark_jax.data.records import Records
from dspark_jax.train.config import TrainConfig, fitted
from dspark_jax.train.folder import has_checkpoint
from dspark_jax.train.read_text import records_read

TRAIN = (sys.executable, str(Path(__file__).resolve().parent / "train.py"))
MARGIN = 0.05
"""Share of the time for steps that is left free: their speed varies."""
LOADED = 0.5
"""Share of the time of a compilation that its program takes to come from the cache, at most."""

PATIENCE_S = 10.0
"""For a process that was asked to end; then it is killed."""


class OutOfTime(RuntimeError):
    """The time was over before the rate had fallen."""


def continued(name: str, config: Path, given: Sequence[str]) -> list[str]:
    """The overrides of a run that goes on from the drafter ``name``: behind what it has read of the text, from the
    beginning of a text that it has not read.

    Raises FileNotFoundError where there is none, ValueError where it does not say which records it has seen."""
    records = records_read(fitted(load_toml(config, TrainConfig, given)).data, name) or 0
    return [f"drafter.start_from={name}", f"data.first={records}", "optim.warmup_steps=10"]


def steps_of_text(config: TrainConfig) -> int:
    """Steps that the training text lasts for. Raises what ``Records`` raises."""
    data = fitted(config).data
    records = Records(data.train)
    return (len(records.usable(data.length, data.least_learnt)) - data.first) // data.batch


def steps_in(seconds: float, probe: int, lines: Sequence[dict[str, Any]], probe_s: float) -> int:
    """Steps in all that end within ``seconds`` from now, the probed ones among them; at least those.

    Args:
        probe: steps so far. lines: of the run's metrics, about training. probe_s: seconds that their process took.

    Raises ValueError where there are fewer than two lines, one with and one without compilation.
    """
    if len(lines) < 2:
        raise ValueError(f"fewer than two lines of the log in {probe} steps; lower run.log_every or raise --probe")
    step = statistics.median(line["seconds_per_step"] for line in lines[1:])
    compiling = max(lines[0]["seconds_per_step"] - step, 0.0) * lines[0]["step"]
    around = max(probe_s - probe * step - compiling, 0.0) + LOADED * compiling
    return probe + max(int((seconds - around) * (1 - MARGIN) / step), 0)


def train(config: Path, out: Path, changes: Sequence[str], until: float) -> bool:
    """One process of ``scripts/train.py``. False where it was stopped since ``time.monotonic()`` passed ``until``.

    Raises ValueError where it refuses its input, RuntimeError where it ends with another error; it has said why."""
    command = [*TRAIN, "--config", str(config), "--out", str(out)]
    process = subprocess.Popen(command + [part for change in changes for part in ("--set", change)])
    try:
        status = process.wait(max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.terminate()  # not SIGINT, which whatever a shell began in the background ignores
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        return False
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if status:
        kind = ValueError if status == 2 else RuntimeError
        raise kind(f"training ended with status {status}, for the reason above")
    return True


def export(config: Path, out: Path, changes: Sequence[str]) -> None:
    """Writes the drafter of the last checkpoint. Raises CalledProcessError."""
    command = [*TRAIN, "--config", str(config), "--out", str(out), "--export-only", str(out / "drafter")]
    subprocess.run(command + [part for change in changes for part in ("--set", change)], check=True)


def within(config: Path, out: Path, given: Sequence[str], seconds: float, probe: int) -> dict[str, Any]:
    """The command; returns the summary.

    Raises ValueError, FileNotFoundError for input that is wrong; OutOfTime."""
    begun = time.monotonic()
    until, read = begun + seconds, load_toml(config, TrainConfig, given)
    if read.optim.schedule != "wsd":
        raise ValueError('optim.schedule must be "wsd", whose end may be chosen while it runs')
    if has_checkpoint(out):
        raise ValueError(f"{out} holds a run already; take another folder")
    text = steps_of_text(read)
    if text <= probe:
        raise ValueError(
            f"{read.data.train}: behind record {read.data.first} there is text for {max(text, 0)} steps, but the probe "
            f"alone takes {probe}; bring more text"
        )
    every = max(probe // 5, 1)
    changes = [*given, "run.evaluate_every_s=1e9", "run.save_every_s=20", f"run.log_every={every}"]
    ends = {"optim.total_steps": probe, "optim.decay_steps": 0}

    def all_changes() -> list[str]:
        return [*changes, *(f"{name}={value}" for name, value in ends.items())]

    whole = train(config, out, all_changes(), until)
    took = time.monotonic() - begun
    if not whole and not has_checkpoint(out):
        raise OutOfTime(f"{seconds:g} s were over before the first checkpoint; nothing is there to be exported")
    total, decayed = probe, False
    if whole:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if "seconds_per_step" in line]
        total = min(steps_in(until - time.monotonic(), probe, lines, took), text)
    if total > probe:
        ends = {"optim.total_steps": total, "optim.decay_steps": max(total // 4, 1)}
        print(f"{probe} steps took {took:.0f} s; {total} in all, a quarter with a falling rate", flush=True)
        decayed = train(config, out, all_changes(), until)
    if not (whole if total == probe else decayed):
        export(config, out, all_changes())
    trained = read_config(out / "drafter")["training"]
    result = {**trained, "decayed": decayed, "text_left": text - trained["steps"]}
    result |= {"seconds": round(time.monotonic() - begun, 1), "probe_seconds": round(took, 1)}
    print(json.dumps(result), flush=True)
    if not decayed:
        raise OutOfTime(f"{seconds:g} s were not enough for the rate to fall; exported as it is to {out / 'drafter'}")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = folder_parser(__doc__, out="the run's folder, a new one")
    parser.add_argument("--seconds", type=float, required=True, help="from now to the end of everything")
    parser.add_argument("--probe", type=int, default=20, help="steps that are timed")
    parser.add_argument("--start-from", metavar="NAME", help="a drafter to continue: shipped, or its folder")
    args = parser.parse_args(argv)

    def act() -> None:
        first = continued(args.start_from, args.config, args.set) if args.start_from else []
        within(args.config, args.out, [*first, *args.set], args.seconds, args.probe)

    return exit_status(act, RuntimeError, subprocess.CalledProcessError)


if __name__ == "__main__":
    sys.exit(main())
