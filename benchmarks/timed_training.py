"""Trains a drafter for a number of CPU seconds, with ``scripts/train.py``: the rows of ``compare_drafters.py``.

The first ``PROBE`` steps say what a step and a bigram start cost; from that follows the number of steps of the row, the
last quarter of them with a falling learning rate. What was really used is measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tethered
from report import ROOT

from dspark_jax.config_toml import load_toml
from dspark_jax.data.line_file import differences
from dspark_jax.data.records import OFFSETS, TOKENS
from dspark_jax.engine.origin import processor
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.folder import defaults, flat
from dspark_jax.whole_file import write_whole

TRAIN = (sys.executable, str(ROOT / "scripts" / "train.py"))
PROBE = 20
"""Steps that are timed, but for those before the first line of the log, which compile."""
POLL_S = 0.2
"""Between two looks at a training process."""
DONE, CPU = "done.json", "cpu_seconds.jsonl"
NEVER = "run.evaluate_every_s=1e9"
"""No held-out measurements during training: they would count as training."""
PLANNED = ("optim.total_steps", "optim.decay_steps", "drafter.bigram_records")
"""Settings that follow from a row's time."""
ELSEWHERE = ("data.train", "data.heldout", "run.")
"""Settings that change nothing in what is trained; the text itself is told by ``text_of``."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One drafter: a training configuration, its overrides, and drafts a block in the evaluation (0: its own).
    seconds: of CPU time; 0: the comparison's."""

    name: str
    config: Path
    set: tuple[str, ...] = ()
    drafts: int = 0
    seconds: float = 0.0


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process and all its threads; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines about training of a run's metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [line for line in map(json.loads, lines) if "ce" in line]


def last_step(folder: Path) -> int:
    """Of the last line about training."""
    return max((line["step"] for line in metrics(folder)), default=0)


def environment_of(threads: int) -> dict[str, Any]:
    """What ``tethered.start`` takes: a thread of XLA for every core that the process may use."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {"cores": cores, "cwd": str(ROOT), "env": {**os.environ, "PYTHONPATH": str(ROOT)}}


def leg(row: Row, folder: Path, changes: Sequence[str], threads: int) -> list[tuple[int, float]]:
    """Trains until ``optim.total_steps``. Returns (step, CPU seconds) at every line of the log that was seen to appear,
    and appends them to ``CPU`` as well, behind a line ``null`` for the start.

    Raises SystemExit where training ends with an error.
    """
    command = [*TRAIN, "--config", str(row.config), "--out", str(folder)]
    command += [part for change in changes for part in ("--set", change)]
    # Lines up to this step are there; a process that goes on rewinds them, and compiles until it has the first again.
    known = last_step(folder)
    process = tethered.start(command, **environment_of(threads))
    seen: list[tuple[int, float]] = []
    try:
        while process.poll() is None:
            step, used = last_step(folder), cpu_seconds(process.pid)
            if step > known and used is not None:
                with open(folder / CPU, "a", encoding="utf-8") as file:
                    file.write("" if seen else "null\n")
                    file.write(json.dumps([step, used]) + "\n")
                seen.append((step, used))
                known = step
            time.sleep(POLL_S)
    finally:
        tethered.stop(process)
    if process.returncode:
        raise SystemExit(f"{row.name}: training ended with status {process.returncode}")
    return seen


def cpu_of_steps(folder: Path, steps: int) -> float | None:
    """CPU seconds of ``steps`` steps, from ``CPU``; None where none was timed.

    Of a stretch that was timed twice, since the first time was lost, the second counts. Steps that were not timed
    (before the first line of a start: they compile) count as the mean of the others.
    """
    path = folder / CPU
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    each: list[float | None] = [None] * steps
    before: tuple[int, float] | None = None
    for line in map(json.loads, lines):
        if line is not None and before is not None:
            begin, end = before[0], min(line[0], steps)
            each[begin:end] = [(line[1] - before[1]) / (line[0] - begin)] * (end - begin)
        before = line
    timed = [x for x in each if x is not None]
    return sum(timed) * steps / len(timed) if timed else None


def cpu_of_start(folder: Path) -> float:
    """CPU seconds of the last start that made the beginning of a drafter; 0 where that takes no time worth counting."""
    path = folder / "environment.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
    found = [line["bigram_start_cpu_seconds"] for line in lines if "bigram_start_cpu_seconds" in line]
    return found[-1] if found else 0.0


class Plans:
    """The numbers of steps of the rows, in a file. Raises SystemExit for one that is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError as error:
            raise SystemExit(f"{path}: not a file of plans ({error}); delete it") from error

    def of(self, row: Row, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """The plan of a row, None where it was not probed yet. Raises SystemExit where it is for something else."""
        found = self._known.get(row.name)
        if found is not None:
            require(found, wanted, f"{self.path}: {row.name} was probed", "delete its entry there to probe it anew")
        return found

    def add(self, row: Row, plan: dict[str, Any]) -> None:
        """Writes a plan down."""
        self._known[row.name] = plan
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self._known, indent=1) + "\n")


def text_of(folder: Path) -> str | None:
    """Short hash of a training text: where its records end, and its first MiB. None where it is not here."""
    if not ((folder / OFFSETS).is_file() and (folder / TOKENS).is_file()):
        return None
    digest = hashlib.sha256((folder / OFFSETS).read_bytes())
    with open(folder / TOKENS, "rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()[:16]


def wanted_of(row: Row, threads: int, overrides: Sequence[str]) -> dict[str, Any]:
    """What decides a row: its time, and all settings of its training with those that are overridden, by name. Raises
    ValueError, FileNotFoundError for a configuration that cannot be used."""
    config = load_toml(row.config, TrainConfig, [*overrides, *row.set])
    settings = flat(json.loads(json.dumps(dataclasses.asdict(config), default=str)))
    for name in [name for name in settings if name.startswith((*PLANNED, *ELSEWHERE))]:
        del settings[name]
    settings["data.teacher_cache"] = config.data.teacher_cache is not None  # what a step costs, wherever it lies
    return {"seconds": row.seconds, "threads": threads, "text": text_of(config.data.train), "settings": settings}


def require(known: Mapping[str, Any], wanted: Mapping[str, Any], place: str, remedy: str) -> None:
    """Raises SystemExit, with the differences and the remedy, where ``known`` was made for something else.

    A setting that was not known then counts as its default. A text that is not here is not compared.
    """
    was = {key: known.get(key) for key in wanted}
    if isinstance(was["settings"], Mapping):
        standard = {key: value for key, value in defaults(TrainConfig).items() if key in wanted["settings"]}
        was["settings"] = {**standard, **was["settings"]}
    if wanted["text"] is None:
        del was["text"]
    wrong = differences(was, {key: wanted[key] for key in was})
    if wrong:
        raise SystemExit(f"{place} otherwise ({'; '.join(wrong)}): {remedy}, or take the settings from then")


def changes_of(row: Row, overrides: Sequence[str], wanted: Mapping[str, Any], steps: int, decay: int) -> list[str]:
    """The overrides of a training of ``steps`` steps, the last ``decay`` with a falling rate."""
    changes = [*overrides, *row.set, NEVER, f"optim.total_steps={steps}", f"optim.decay_steps={decay}"]
    if wanted["settings"]["drafter.bigram_start"]:
        changes.append(f"drafter.bigram_records={steps * wanted['settings']['data.batch']}")
    return changes


def probe(
    row: Row, folder: Path, wanted: Mapping[str, Any], threads: int, overrides: Sequence[str], plans: Plans
) -> dict[str, Any]:
    """How many steps a row gets. Where no plan says, ``PROBE`` steps are trained in a folder beside ``folder``."""
    known = plans.of(row, wanted)
    if known is None:
        place = folder.with_name(folder.name + "-probe")
        shutil.rmtree(place, ignore_errors=True)  # one that was not finished
        seen = leg(row, place, changes_of(row, overrides, wanted, PROBE, 0), threads)
        start = cpu_of_start(place)  # by far the most of it does not depend on the number of records
        shutil.rmtree(place)
        if len(seen) < 2:
            raise SystemExit(f"{row.name}: fewer than two lines of the log in {PROBE} steps; lower run.log_every")
        (first, begun), (last, ended) = seen[0], seen[-1]
        per_step = (ended - begun) / (last - first)
        if per_step <= 0:
            raise SystemExit(f"{row.name}: {last - first} steps took no CPU time that can be measured")
        every = load_toml(row.config, TrainConfig, [*overrides, *row.set]).run.log_every
        steps = int((row.seconds - start) / per_step) // every * every  # the last one has a line, too
        if steps <= PROBE:
            raise SystemExit(
                f"{row.name}: {row.seconds:g} CPU seconds are too few: a step takes {per_step:.3g}, the start "
                f"{start:.3g}, and {PROBE} steps were needed to find that out; give it more seconds"
            )
        known = {**wanted, "steps": steps, "probe_seconds_per_step": round(per_step, 4)}
        known |= {"probe_start_seconds": start, "processor": processor()}
        plans.add(row, known)
    return known


def train(
    row: Row, folder: Path, wanted: Mapping[str, Any], threads: int, overrides: Sequence[str], plans: Plans
) -> dict[str, Any]:
    """Trains a row for its time; returns what is to be said about it. A finished one is left as it is."""
    done = folder / DONE
    if done.is_file():
        known = json.loads(done.read_text())
        require(known, wanted, f"{folder} was trained", "delete it to train the row anew, change --runs")
        return known
    plan = probe(row, folder, wanted, threads, overrides, plans)
    steps = plan["steps"]
    leg(row, folder, changes_of(row, overrides, wanted, steps, steps // 4), threads)
    line, used, start = metrics(folder)[-1], cpu_of_steps(folder, steps), cpu_of_start(folder)
    result = {**wanted, "steps": steps, "positions": line["positions"], "records": line["records"]}
    result["cpu_seconds"] = None if used is None else round(used + start, 2)
    result["start_cpu_seconds"] = start
    result |= {key: plan[key] for key in ("probe_seconds_per_step", "probe_start_seconds")}
    write_whole(done, json.dumps(result) + "\n")
    return result
