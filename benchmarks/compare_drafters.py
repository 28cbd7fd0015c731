"""Which drafter is best for the same training time?

    python benchmarks/compare_drafters.py --config configs/compare/smollm2.toml --runs runs/compare \
        --out benchmarks/results/equal_time_smollm2 --prompts prompts --set-all data.train=runs/data/train \
        --set-all data.heldout=runs/data/heldout

Trains every row with ``scripts/train.py`` for its number of CPU seconds, then decodes the prompts of the evaluation
with all of them (``scripts/evaluate.py``: full blocks, 24 prompts a set, 128 tokens, bootstrap intervals over prompts),
and writes one table as Markdown and JSON.

Time is what the training process computes (user and system time of all its threads, two by default), between lines of
its log: start-up, compilation, the last checkpoint and the evaluation do not count. Wall-clock time would depend on
what else the machine does. The first ``PROBE`` steps say what a step costs; from that follows the number of steps of
the row, the last quarter of them with a falling learning rate (``wsd``). Rows read the same records in the same order;
a cheaper step sees more of them. The numbers of steps are kept in ``OUT_rows/plans.json`` and used again: with
``--plan`` all rows are probed on one machine on one day, and may then be trained on others.

Killed and started again, finished rows are kept and a begun one goes on from its last checkpoint. ``--only a,b`` trains
these rows and compares all that are finished.

Every row that was decoded is also kept in ``OUT_rows/NAME.json`` (``kept_rows.py``). One that is kept there, and has no
run in ``--runs``, is taken from there: a comparison may be made in pieces, on several days.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kept_rows
from kept_rows import KeptRow
from report import environment, processor

from dspark_jax.config_toml import load_toml
from dspark_jax.evaluate.config import EvaluateConfig
from dspark_jax.evaluate.report import show, table
from dspark_jax.train.folder import write_whole

ROOT = Path(__file__).resolve().parents[1]
PROBE = 20
"""Steps that are timed, but for those before the first line of the log, which compile."""
PLANS = "plans"
NEVER = "run.evaluate_every_s=1e9"
"""No held-out measurements during training: they would count as training."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One drafter: a training configuration, its overrides, and drafts a block in the evaluation (0: its own)."""

    name: str
    config: Path
    set: tuple[str, ...] = ()
    drafts: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Rows to compare. reference: the row that the others' later positions are divided by. seconds: of CPU time, for
    rows that do not say."""

    evaluate: Path
    rows: tuple[Row, ...]
    reference: str
    seconds: float = 1800.0

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names) or self.reference not in names:
            raise ValueError(f"rows need different names, one of them {self.reference!r}, found {', '.join(names)}")
        if PLANS in names:
            raise ValueError(f"a row cannot be named {PLANS!r}: so is the file of plans beside the rows")


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process and all its threads; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def last_step(metrics: Path) -> int:
    """Of the last whole line about training."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    return max((line["step"] for line in map(json.loads, lines) if "ce" in line), default=0)


def leg(row: Row, folder: Path, steps: int, decay: int, threads: int, overrides: list[str]) -> list[tuple[int, float]]:
    """Trains to ``steps``. Returns (step, CPU seconds) at every line of the log that was seen to appear."""
    changes = [*overrides, *row.set, NEVER, f"optim.total_steps={steps}", f"optim.decay_steps={decay}"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(row.config), "--out", str(folder)]
    command += [part for change in changes for part in ("--set", change)]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    # A thread of XLA for every core that the process may use.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    seen: list[tuple[int, float]] = []
    try:
        known = last_step(folder / "metrics.jsonl")
        while process.poll() is None:
            step, used = last_step(folder / "metrics.jsonl"), cpu_seconds(process.pid)
            if step != known and used is not None:
                seen.append((step, used))
                known = step
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SystemExit(f"{row.name}: training ended with status {process.returncode}")
    return seen


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
        if found is not None and {key: found[key] for key in wanted} != wanted:
            raise SystemExit(f"{self.path}: {row.name} was probed otherwise ({found} instead of {wanted}); delete it")
        return found

    def add(self, row: Row, plan: dict[str, Any]) -> None:
        """Writes a plan down."""
        self._known[row.name] = plan
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self._known, indent=1) + "\n")


def wanted_of(row: Row, seconds: float, threads: int) -> dict[str, Any]:
    """What decides a row's number of steps."""
    return {"seconds": seconds, "threads": threads, "set": list(row.set)}


def probe(row: Row, folder: Path, seconds: float, threads: int, overrides: list[str], plans: Plans) -> dict[str, Any]:
    """How many steps a row gets. Where no plan says, ``PROBE`` steps are trained in a folder beside ``folder``."""
    wanted = wanted_of(row, seconds, threads)
    known = plans.of(row, wanted)
    if known is None:
        place = folder.with_name(folder.name + "-probe")
        shutil.rmtree(place, ignore_errors=True)  # one that was not finished
        seen = leg(row, place, PROBE, 0, threads, overrides)
        shutil.rmtree(place)
        (first, begun), (last, ended) = seen[0], seen[-1]
        if last == first:
            raise SystemExit(f"{row.name}: fewer than two lines of the log in {PROBE} steps; lower run.log_every")
        per_step = (ended - begun) / (last - first)
        steps = max(PROBE + 4, round(seconds / per_step))
        known = {**wanted, "steps": steps, "probe_seconds_per_step": round(per_step, 4), "processor": processor()}
        plans.add(row, known)
    return known


def train(row: Row, folder: Path, seconds: float, threads: int, overrides: list[str], plans: Plans) -> dict[str, Any]:
    """Trains a row for its time; returns what is to be said about it. A finished one is left as it is."""
    done = folder / "done.json"
    wanted = wanted_of(row, seconds, threads)
    if done.is_file():
        known = json.loads(done.read_text())
        if {key: known[key] for key in wanted} != wanted:
            raise SystemExit(
                f"{folder} was trained otherwise ({known} instead of {wanted}); delete it or change --runs"
            )
        return known
    plan = probe(row, folder, seconds, threads, overrides, plans)
    steps = plan["steps"]
    seen = leg(row, folder, steps, steps // 4, threads, overrides)
    line = next(x for x in reversed(metrics(folder)) if "ce" in x)
    cost = (seen[-1][1] - seen[0][1]) / max(seen[-1][0] - seen[0][0], 1) if len(seen) > 1 else None
    result = {**wanted, "steps": steps, "positions": line["positions"], "records": line["records"]}
    result |= {"cpu_seconds_per_step": None if cost is None else round(cost, 3)}
    result["probe_seconds_per_step"] = plan["probe_seconds_per_step"]
    done.write_text(json.dumps(result))
    return result


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluate(config: CompareConfig, rows: list[Row], runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Decodes with all rows, the reference first."""
    rows = sorted(rows, key=lambda row: row.name != config.reference)
    entries = ", ".join(
        f'{{name="{row.name}", path="{runs / row.name / "drafter"}", num_speculative_tokens={row.drafts}}}'
        for row in rows
    )
    command = [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "--config", str(config.evaluate)]
    command += ["--out", str(runs / "evaluation")]
    for change in (f"drafters=[{entries}]", "thresholds=[]", *overrides):
        command += ["--set", change]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return json.loads((runs / "evaluation" / "results.json").read_text())


def markdown(config: CompareConfig, trained: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Any]) -> str:
    """The table of every way of sampling."""
    parts = [
        "# Drafters at equal training time\n",
        "CPU seconds of the training process (all threads), start-up and compilation not counted; accepted length by "
        "rolled-out decoding, full blocks. Brackets: 95 % intervals, prompts resampled within their sets. Later "
        f"positions: mean conditional acceptance at positions 2 to the last, and its ratio to {config.reference}.\n",
    ]
    for run, rows in runs.items():
        groups = [name for name in rows[0]["tau"] if name not in ("all", "macro")]
        head = [
            "drafter",
            "CPU s",
            "steps",
            "positions",
            "accepted length, macro",
            *groups,
            "position 1",
            "later",
            "ratio",
        ]
        body = []
        for entry in rows:
            known = trained[entry["name"]]
            used = known["probe_seconds_per_step"]
            cells = [
                f"{used * known['steps']:.0f}",
                str(known["steps"]),
                f"{known['positions'] / 1e6:.2f} M",
            ]
            cells += [show(entry["tau"][name], 2) for name in ("macro", *groups)]
            cells += [show(entry["conditional"][0], 3), show(entry["later"], 3), show(entry.get("later_ratio"), 2)]
            body.append([entry["name"], *cells])
        parts += [f"## {run}\n", table(head, body)]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "compare" / "smollm2.toml")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the training runs and the evaluation")
    parser.add_argument("--out", type=Path, required=True, help="result without ending: OUT.md and OUT.json")
    parser.add_argument("--only", default="", help="rows to train, separated by commas; empty: all")
    parser.add_argument("--plan", action="store_true", help="only find the numbers of steps")
    parser.add_argument("--threads", type=int, default=2, help="cores of a training process")
    parser.add_argument("--prompts", type=Path, help="folder with the evaluation's prompt files, by their names")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="overrides the comparison's setting"
    )
    parser.add_argument("--set-all", action="append", default=[], metavar="a.b=c", help="overrides every training's")
    parser.add_argument(
        "--set-evaluate", action="append", default=[], metavar="a.b=c", help="overrides the evaluation's"
    )
    args = parser.parse_args()
    config, runs = load_toml(args.config, CompareConfig, args.set), args.runs.absolute()
    chosen = set(filter(None, args.only.split(",")))
    unknown = chosen - {row.name for row in config.rows}
    if unknown:
        parser.error(f"--only: no such rows: {', '.join(sorted(unknown))}")
    store = args.out.with_name(args.out.name + "_rows")
    plans = Plans(store / f"{PLANS}.json")
    trained: dict[str, dict[str, Any]] = {}
    kept: dict[str, KeptRow] = {}
    for row in config.rows:
        folder, file = runs / row.name, store / f"{row.name}.json"
        if file.is_file() and not folder.exists():
            try:
                kept[row.name] = KeptRow.load(file)
            except ValueError as error:
                parser.error(f"{error}; delete it")
            continue
        if chosen and row.name not in chosen and not (folder / "done.json").is_file():
            continue
        seconds = row.seconds or config.seconds
        print(f"{row.name}: {seconds:g} CPU seconds", flush=True)
        if args.plan:
            print(f"{row.name}: {probe(row, folder, seconds, args.threads, args.set_all, plans)['steps']} steps")
        else:
            trained[row.name] = train(row, folder, seconds, args.threads, args.set_all, plans)
    if args.plan:
        return
    changes = list(args.set_evaluate)
    if args.prompts is not None:
        listed = ", ".join(
            f'{{name="{s.name}", path="{args.prompts.absolute() / s.path.name}", prompts={s.prompts}, '
            f'group="{s.group}"}}'
            for s in load_toml(config.evaluate, EvaluateConfig, []).suites
        )
        changes.insert(0, f"suites=[{listed}]")
    made = environment()
    if trained:
        results = evaluate(config, [row for row in config.rows if row.name in trained], runs, changes)
        for name, facts in trained.items():
            kept[name] = KeptRow.of(name, facts, runs / "evaluation", results, made)
            kept[name].save(store)
    if not kept:
        parser.error(f"nothing to compare: no row is trained in {args.runs} or kept in {store}")
    settings = load_toml(config.evaluate, EvaluateConfig, changes)
    rows = [kept[row.name] for row in config.rows if row.name in kept]
    groups = {suite.name: suite.group for suite in settings.suites}
    try:
        measured = kept_rows.measure(rows, config.reference, groups, settings.bootstrap)
    except ValueError as error:
        parser.error(f"{error} (rows kept in {store})")
    text = markdown(config, {row.name: row.trained for row in rows}, measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    content = {**made, "reference": config.reference, "trained": {row.name: dict(row.trained) for row in rows}}
    content |= {"settings": dict(rows[0].headers), "runs": measured}
    args.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
