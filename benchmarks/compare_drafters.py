"""Which drafter is best for the same training time?

    python benchmarks/compare_drafters.py --config configs/compare/smollm2.toml --runs runs/compare \
        --out benchmarks/results/equal_time_smollm2 --prompts prompts --set-all data.train=runs/data/train \
        --set-all data.heldout=runs/data/heldout

Trains every row with ``scripts/train.py`` for its number of CPU seconds, then decodes the prompts of the evaluation
with all of them (``scripts/evaluate.py``: full blocks, 24 prompts a set, 128 tokens, bootstrap intervals over prompts),
and writes one table as Markdown and JSON, rows of one training time together.

Time is what the training process computes (user and system time of all its threads, two by default): its steps and
the checkpoints among them, between lines of its log, and the bigram start of a Markov head. Start-up, compilation of
the steps, the last checkpoint and the evaluation do not count. Wall-clock time would depend on what else the machine
does. ``timed_training.py`` finds the number of steps from the first few; the last quarter of all has a falling learning
rate (``wsd``). What was really used is measured and stands in the table.

Rows read the same records in the same order; a cheaper step sees more of them. A bigram start reads those records only
that its row trains on. The trimmed draft vocabulary is counted over the whole training text, the same for all rows.

The numbers of steps are kept in ``OUT_rows/plans.json`` and used again: with ``--plan`` all rows are probed on one
machine on one day, and may then be trained on others.

Killed and started again, finished rows are kept and a begun one goes on from its last checkpoint; a training process
ends with this one. ``--only a,b`` trains these rows and compares all that are finished or kept.

Every row that was decoded is also kept in ``OUT_rows/NAME.json`` (``kept_rows.py``). One that is kept there, and has no
run in ``--runs``, is taken from there: a comparison may be made in pieces, on several days. A row of other settings or
other text than are asked for now, wherever it comes from, is refused with the difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kept_rows
import tethered
from kept_rows import KeptRow
from report import ROOT, environment
from timed_training import DONE, Plans, Row, environment_of, probe, require, train, wanted_of

from dspark_jax.command_line import path_error
from dspark_jax.config_toml import load_toml
from dspark_jax.evaluate.acceptance import LEAST_TRIES
from dspark_jax.evaluate.config import PLAIN, EvaluateConfig
from dspark_jax.evaluate.report import show, table
from dspark_jax.whole_file import write_whole

PLANS = "plans"
EVALUATE = (sys.executable, str(ROOT / "scripts" / "evaluate.py"))


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Rows to compare.

    Attributes:
        references: the row, for every training time one, that others of that time are divided by.
        seconds: of CPU time, for rows that do not say.
        note: what else the reader must know of the rows.
    """

    evaluate: Path
    rows: tuple[Row, ...]
    references: tuple[str, ...]
    seconds: float = 1800.0
    note: str = ""

    def __post_init__(self) -> None:
        rows = tuple(dataclasses.replace(row, seconds=row.seconds or self.seconds) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        names = [row.name for row in rows]
        unknown = set(self.references) - set(names)
        if len(set(names)) < len(names) or unknown:
            raise ValueError(f"rows need different names, references among them: {', '.join([*names, *unknown])}")
        wrong = [name for name in names if name in (PLANS, PLAIN) or "/" in name]
        if wrong:
            raise ValueError(f"a row cannot be named {wrong[0]!r}: its name is that of a file, and those are taken")
        for seconds in dict.fromkeys(row.seconds for row in rows):
            count = sum(row.seconds == seconds and row.name in self.references for row in rows)
            if count != 1:
                raise ValueError(f"references: rows of {seconds:g} CPU seconds need one, found {count}")

    def reference(self, seconds: float) -> str:
        """The reference of a training time."""
        return next(row.name for row in self.rows if row.seconds == seconds and row.name in self.references)


def kept_row(file: Path, row: Row, wanted: Mapping[str, Any]) -> KeptRow:
    """A row from its file. Raises SystemExit where it is none, or one of other settings."""
    try:
        found = KeptRow.load(file)
    except ValueError as error:
        raise SystemExit(f"{error}; delete it") from error
    require(found.trained, wanted, f"{file} was trained", "delete it to train the row anew, change --out")
    drafts = row.drafts or wanted["settings"]["drafter.block_size"]
    if found.drafts != drafts:
        raise SystemExit(f"{file} was decoded with {found.drafts} drafts a block, not {drafts}: delete it")
    return found


def evaluate(config: CompareConfig, rows: list[Row], runs: Path, overrides: list[str]) -> dict[str, Any]:
    """Decodes with all rows. Raises SystemExit where that ends with an error."""
    entries = ", ".join(
        f'{{name="{row.name}", path="{runs / row.name / "drafter"}", num_speculative_tokens={row.drafts}}}'
        for row in rows
    )
    command = [*EVALUATE, "--config", str(config.evaluate), "--out", str(runs / "evaluation")]
    for change in (f"drafters=[{entries}]", "thresholds=[]", *overrides):
        command += ["--set", change]
    process = tethered.start(command, **environment_of(len(os.sched_getaffinity(0))))
    try:
        status = process.wait()
    finally:
        tethered.stop(process)
    if status:
        raise SystemExit(
            f"the evaluation ended with status {status}, for the reason above; where a row was trained anew, delete "
            f"what was decoded with the old drafter: {runs / 'evaluation' / 'records'}/*/NAME.jsonl"
        )
    return json.loads((runs / "evaluation" / "results.json").read_text())


def measure(
    config: CompareConfig, rows: Sequence[KeptRow], groups: Mapping[str, str], resamples: int
) -> dict[str, list[dict[str, Any]]]:
    """Every way of sampling: all rows, by training time, each with its ``seconds`` and its ``reference``.

    Raises ValueError where rows were trained on another text or decoded otherwise.
    """
    first = rows[0]
    for row in rows[1:]:
        if row.trained["text"] != first.trained["text"]:
            raise ValueError(f"{row.name} and {first.name} were trained on different text: train one of them anew")
    kept_rows.require_alike(rows)
    found: dict[str, list[dict[str, Any]]] = {}
    seconds = {row.name: row.seconds for row in config.rows}
    for time_s in dict.fromkeys(row.seconds for row in config.rows):
        mine, reference = [row for row in rows if seconds[row.name] == time_s], config.reference(time_s)
        if not mine:
            continue
        for run, entries in kept_rows.measure(mine, reference, groups, resamples).items():
            found.setdefault(run, []).extend({**e, "seconds": time_s, "reference": reference} for e in entries)
    return found


HEAD = """# Drafters at equal training time

CPU seconds of the training process (all threads), measured, a bigram start of the Markov head included; start-up and
compilation not counted. Accepted length by rolled-out decoding, full blocks. Brackets: 95 % intervals, prompts
resampled within their sets. Later positions: of all drafts behind position 1 whose predecessors in the block were
accepted, the share that was accepted (pooled); its ratio to the reference over the positions, in parentheses, that both
drafters have, the same prompts resampled for both. The mean of positions gives each the same weight, and takes those
with at least {tries} tries in both. Tries: blocks that reached a position. Rows are compared with those of the same
training time. All read the same records in the same order and share one trimmed draft vocabulary, counted over the
whole training text; a bigram start reads those records only that its row trains on.
"""


def markdown(config: CompareConfig, trained: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Any]) -> str:
    """The tables of every way of sampling, one a training time."""
    parts = [HEAD.format(tries=LEAST_TRIES)]
    if config.note:
        parts.append(config.note.strip() + "\n")
    for run, rows in runs.items():
        groups = [name for name in rows[0]["tau"] if name not in ("all", "macro")]
        for seconds in dict.fromkeys(entry["seconds"] for entry in rows):
            mine = [entry for entry in rows if entry["seconds"] == seconds]
            to = f"to {mine[0]['reference']}"
            head = ["drafter", "CPU s", "steps", "positions", "accepted length, macro", to, *groups]
            head += ["position 1", "later, pooled", to, "mean of positions, " + to, "tries of position 1, 2, ..."]
            body = []
            for entry in mine:
                known = trained[entry["name"]]
                used = known["cpu_seconds"]
                cells = [
                    "" if used is None else f"{used:.0f}",
                    str(known["steps"]),
                    f"{known['positions'] / 1e6:.2f} M",
                ]
                cells += [show(entry["tau"]["macro"], 2), show(entry.get("tau_ratio"), 2)]
                cells += [show(entry["tau"][name], 2) for name in groups]
                cells += [show(entry["conditional"][0], 3), show(entry["later_pooled"], 3)]
                cells += [
                    show(entry.get(name), 2, positions=True) for name in ("later_pooled_ratio", "later_mean_ratio")
                ]
                body.append([entry["name"], *cells, ", ".join(map(str, entry["tried"]))])
            parts += [f"## {run}, {seconds:g} CPU seconds\n", table(head, body)]
    return "\n".join(parts)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    # So that a child is stopped, and not only when this process is gone.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        compare(args)
    except ValueError as error:
        raise SystemExit(f"compare_drafters: {error}") from error
    except OSError as error:
        if (line := path_error(error)) is None:
            raise
        raise SystemExit(f"compare_drafters: {line}") from error


def compare(args: argparse.Namespace) -> None:
    """The command. Raises SystemExit, ValueError, FileNotFoundError with one line that says what is wrong."""
    config, runs = load_toml(args.config, CompareConfig, args.set), args.runs.absolute()
    chosen = set(filter(None, args.only.split(",")))
    unknown = chosen - {row.name for row in config.rows}
    if unknown:
        raise ValueError(f"--only: no such rows: {', '.join(sorted(unknown))}")
    store = args.out.with_name(args.out.name + "_rows")
    plans = Plans(store / f"{PLANS}.json")
    wanted = {row.name: wanted_of(row, args.threads, args.set_all) for row in config.rows}
    trained: dict[str, dict[str, Any]] = {}
    kept: dict[str, KeptRow] = {}
    for row in config.rows:
        folder, file, mine = runs / row.name, store / f"{row.name}.json", not chosen or row.name in chosen
        finished = (folder / DONE).is_file()
        if file.is_file() and not finished and not (folder.exists() and mine):
            kept[row.name] = kept_row(file, row, wanted[row.name])
            continue
        if not mine and not finished:
            continue
        print(f"{row.name}: {row.seconds:g} CPU seconds", flush=True)
        about = (row, folder, wanted[row.name], args.threads, args.set_all, plans)
        if args.plan:
            print(f"{row.name}: {probe(*about)['steps']} steps")
        else:
            trained[row.name] = train(*about)
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
        raise ValueError(f"nothing to compare: no row is trained in {args.runs} or kept in {store}")
    settings = load_toml(config.evaluate, EvaluateConfig, changes)
    rows = [kept[row.name] for row in config.rows if row.name in kept]
    groups = {suite.name: suite.group for suite in settings.suites}
    try:
        measured = measure(config, rows, groups, settings.bootstrap)
    except ValueError as error:
        raise ValueError(f"{error} (rows kept in {store})") from error
    text = markdown(config, {row.name: row.trained for row in rows}, measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out.with_suffix(".md"), text)
    content = {**made, "references": list(config.references), "trained": {row.name: dict(row.trained) for row in rows}}
    content |= {"settings": dict(rows[0].headers), "runs": measured}
    write_whole(args.out.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    print(text)
    for name in trained:
        print(f"{name}: exported to {runs / name / 'drafter'}; copy it from there before the run is deleted")


if __name__ == "__main__":
    main()
