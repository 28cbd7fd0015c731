"""Does deciding drafts by load pay? Throughput of a real engine at several numbers of concurrent users, by arm.

    python benchmarks/bench_load.py --prompts mt-bench.jsonl gsm8k.jsonl humaneval.jsonl \
        --out benchmarks/results/load_smollm2 --traces 96

Closed loop: every user asks again as soon as it is answered. Arms: no speculation, fixed numbers of drafts, a static
confidence threshold, the adaptive scheduler (mode ``lagged``). A cell is one arm at one concurrency for --seconds after
its warm-up; a round has every cell once, in random order; --shown concurrencies run in the first round only. The same
prompts and seeds for every arm. All programs are compiled before the first cell. Each round begins with step times and
prompt times of all arms, in turn, for the simulator; the adaptive arm decides by the step times that it measured when
the run began.

Writes OUT.jsonl cell by cell: started again with the same settings, code, weights, calibration and cores the command
goes on where it was, and with nothing left to do it only writes the reports anew: OUT.json, OUT.md, OUT.png, and in
OUT_step_times/ each arm's step times, medians over rounds (adaptive_start.json: those that the adaptive arm decides
by). OUT_traces.npz (--traces N requests) is what the simulator replays. At the default temperature 0 all arms write the
same texts. `--target tiny --seconds 1` tries the command out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import environment
from serving.arms import Arm, load_arms
from serving.cells import Meter, prompt_ms, run_cell, schedule
from serving.engines import Steps, build, content_hash, load_models, measure, over_rounds, save_whole, table_of
from serving.figures import serving_figure
from serving.load_analysis import analyse
from serving.load_report import markdown
from serving.record import record
from serving.workload import Workload, read

from dspark_jax import Engine, Sampling
from dspark_jax.serve.startup import enable_compilation_cache
from dspark_jax.targets import stop_ids
from dspark_jax.whole_file import write_whole


def numbers(text: str) -> tuple[int, ...]:
    """``1,4,16`` as integers; nothing as none."""
    return tuple(int(part) for part in text.split(",") if part.strip())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="results without their endings")
    parser.add_argument("--prompts", nargs="+", help="JSONL files, as for scripts/evaluate.py")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-135m-instruct-dspark")
    parser.add_argument("--concurrency", type=numbers, default=(1, 4, 16))
    parser.add_argument("--shown", type=numbers, default=(8, 32), help="one round, no bar")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--warm-seconds", type=float, default=3.0)
    parser.add_argument("--fixed", type=numbers, default=(1, 3, 7))
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="rejection")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=320)
    parser.add_argument("--max-programs", type=int, default=40, help="of the arms that choose lengths")
    parser.add_argument("--profile-seconds", type=float, default=45.0)
    parser.add_argument(
        "--measure-seconds", type=float, default=6.0, help="of step times, a round; they are measured twice at least"
    )
    parser.add_argument("--traces", type=int, default=0, help="requests to record for the simulator, once")
    parser.add_argument("--trace-users", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compilation-cache-dir", help='"": none; default: the user\'s cache directory')
    return parser.parse_args(arguments)


SETTINGS = (
    "prompts", "target", "drafter", "concurrency", "shown", "rounds", "seconds", "warm_seconds", "fixed", "threshold",
    "temperature", "verification", "max_new_tokens", "max_model_len", "max_programs", "seed",
)  # fmt: skip


SAME = {
    "commit": "check out that commit, with no other changes",
    "cores": "run on as many cores (taskset)",
    "target": "bring the target's old weights back",
    "drafter": "bring the drafter's old weights back",
    "calibration": "bring the old calibration tables back",
}
"""What all cells of a run must have in common beside its settings, and what to do where it has changed."""

Line = dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """Lines of a run that is there, its header first; none where it has not begun. A last line that a kill has cut off
    is dropped from the file, with a warning.

    Raises:
        ValueError: another line is no JSON object, or the first is no header.
    """
    if not path.is_file():
        return []
    *whole, cut = path.read_text(encoding="utf-8").split("\n")
    if cut:
        print(f"{path}: the last line is not whole and is dropped ({len(cut)} characters)", file=sys.stderr)
        write_whole(path, "".join(line + "\n" for line in whole))
    lines = []
    for number, text in enumerate(whole, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged ({error}): mend it or choose another --out") from error
        if not isinstance(line, dict) or (number == 1 and "settings" not in line):
            raise ValueError(f"{path}, line {number} is none of this command's: mend it or choose another --out")
        lines.append(line)
    return lines


def check_settings(path: Path, header: Line, settings: Line) -> None:
    """Raises ValueError where a run was begun with other settings."""
    before = header["settings"]
    changed = [f"{k} {before.get(k)!r} -> {v!r}" for k, v in settings.items() if before.get(k) != v]
    if changed:
        raise ValueError(f"{path} holds a run with other settings ({'; '.join(changed)}): choose another --out")


def check_same(path: Path, header: Line, here: Line) -> None:
    """Raises ValueError where cells would be added that do not belong to those that are there (``SAME``)."""
    changed = [name for name in SAME if header.get(name) != here[name]]
    if changed:
        what = "; ".join(f"{name} {header.get(name)!r} -> {here[name]!r}" for name in changed)
        remedy = "; ".join(SAME[name] for name in changed)
        raise ValueError(f"{path} holds cells of another {what}: {remedy}, or choose another --out")


def append(path: Path, line: Line) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_steps(found: dict[str, Steps]) -> dict[str, list[list[Any]]]:
    """Step times as JSON: a list of [kind, slots, tokens, milliseconds] for each arm."""
    return {name: [[*place, round(ms, 4)] for place, ms in steps.items()] for name, steps in found.items()}


def read_steps(rows: list[list[Any]]) -> Steps:
    """Of one arm, the other way round."""
    return {(kind, slots, tokens): ms for kind, slots, tokens, ms in rows}


class Run:
    """Models, prompts, and, once they are built, engines of all arms.

    Raises:
        ValueError: a model or prompts cannot be used.
        OSError: they cannot be read.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.perf_counter()
        self.target, self.drafter = load_models(args.target, args.drafter)
        self.calibration = getattr(self.drafter, "calibration", None)
        longest = args.max_model_len - args.max_new_tokens - 16
        if args.prompts:
            prompts, kinds = read(args.prompts, self.target.tokenizer, longest)
        else:  # the tiny model has no tokenizer
            rng = np.random.default_rng(args.seed)
            prompts = tuple(tuple(rng.integers(0, 500, 24).tolist()) for _ in range(64))
            kinds = ("random",) * len(prompts)
        stops = () if self.target.tokenizer is None else stop_ids(self.target)
        sampling = Sampling(temperature=args.temperature)
        self.work = Workload(prompts, kinds, args.max_new_tokens, sampling, args.verification, stops, args.seed)
        self.engines: dict[str, Engine] = {}
        self.meters: dict[str, Meter] = {}

    def weights(self) -> dict[str, str]:
        """Hashes of what decides texts, drafts and confidences."""
        calibration = "none" if self.calibration is None else content_hash(self.calibration)
        return {
            "target": content_hash(self.target),
            "drafter": content_hash(self.drafter),
            "calibration": calibration,
        }

    def build(self, arms: tuple[Arm, ...], fresh: bool) -> None:
        """``fresh``: nothing has been measured, so the adaptive arm's step times are measured now."""
        args = self.args
        for arm in arms:
            engine, table = build(
                arm, self.target, self.drafter, tables(args.out) / f"{arm.name}_start.json", fresh=fresh,
                concurrency=sorted({*args.concurrency, *args.shown}), max_model_len=args.max_model_len,
                max_programs=args.max_programs, profile_seconds=args.profile_seconds, temperature=args.temperature,
                say=self.say,
            )  # fmt: skip
            self.engines[arm.name], self.meters[arm.name] = engine, Meter(table)
            engine.watch(self.meters[arm.name])

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {line}", flush=True)

    def measure(self, number: int) -> Line:
        """Step and prompt times of all arms, at the begin of a round."""
        args, begin = self.args, time.perf_counter()
        most = max(args.concurrency or args.shown)  # the simulator is asked for no more
        buckets = {users for users in (*args.concurrency, *args.shown) if users <= most}
        steps = measure(self.engines, buckets, args.measure_seconds)
        order = self.work.order(0x9807, number)
        requests = [self.work.request(next(order), i, 1) for i in range(1 + max(4, 16 // args.rounds))]
        prompts = {name: round(ms, 3) for name, ms in prompt_ms(self.engines, requests).items()}
        self.say(f"round {number}: step and prompt times measured in {time.perf_counter() - begin:.1f} s")
        return {"round": number, "step_times": write_steps(steps), "prompt_ms": prompts}

    def cell(self, number: int, users: int, arm: str) -> Line:
        engine, args = self.engines[arm], self.args
        late = engine.counters()["late_compiles"]
        feed = self.work.feed(users, number, users)
        found = run_cell(engine, self.meters[arm], feed, users, args.seconds, warm_seconds=args.warm_seconds)
        late = engine.counters()["late_compiles"] - late
        return {"round": number, "concurrency": users, "arm": arm, **found, "late_compiles": late}


def tables(out: str) -> Path:
    return Path(f"{out}_step_times")


def finish(out: str, header: Line, lines: list[Line]) -> None:
    """Report files of the cells that are there, and step times over the rounds."""
    settings = header["settings"]
    measured = [line for line in lines if "step_times" in line]
    about: Line = {"prompt_ms": {}, "step_times_spread": None}
    if measured:
        names = list(measured[0]["step_times"])
        about["prompt_ms"] = {n: round(float(np.mean([m["prompt_ms"][n] for m in measured])), 3) for n in names}
        spreads = []
        for name in names:
            rounds = [read_steps(line["step_times"][name]) for line in measured]
            save_whole(
                table_of(over_rounds(rounds), settings["max_model_len"]),
                tables(out) / f"{name.replace(' ', '_')}.json",
            )
            spreads += [max(ms) / min(ms) - 1 for ms in ([r[k] for r in rounds] for k in rounds[0])]
        about["step_times_spread"] = [round(float(np.median(spreads)), 3), round(max(spreads), 3)]
    cells = [line for line in lines if "arm" in line]
    result = {**header, **about, **analyse(cells, settings["concurrency"], settings["shown"])}
    write_whole(Path(f"{out}.json"), json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    write_whole(Path(f"{out}.md"), text)
    title = f"{settings['target']}, {result['processor']}, {result['cores']} cores"
    serving_figure(Path(f"{out}.png"), result["arms"], title, log=False)
    print(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs what is left to run. Returns the exit status."""
    args = parse(arguments)
    if not args.prompts and args.target != "tiny":
        print("--prompts: at least one JSONL file is needed")
        return 2
    log, traces = Path(f"{args.out}.jsonl"), Path(f"{args.out}_traces.npz")
    untraced = bool(args.traces) and not traces.is_file()
    try:
        lines, todo, run = begin(args, log, untraced)
    except (ValueError, OSError) as error:
        print(f"bench_load: {error}", file=sys.stderr)
        return 2
    if run is not None:
        run_cells(run, lines, todo, log)
    finish(args.out, lines[0], lines[1:])
    if run is not None and untraced:
        found = record(run.engines["threshold"], run.work, args.traces, args.trace_users, run.calibration, run.say)
        found.save(traces)
    return 0


def begin(
    args: argparse.Namespace, log: Path, untraced: bool
) -> tuple[list[Line], list[tuple[int, int, str]], Run | None]:
    """Lines of the log, cells left to run, and what runs them: None where nothing is left.

    Args:
        untraced: texts are to be recorded.

    Raises:
        ValueError: the log is damaged or of another run, or models or prompts cannot be used.
        OSError: they cannot be read.
    """
    arms = load_arms(args.fixed, args.threshold)
    settings = json.loads(json.dumps({name: getattr(args, name) for name in SETTINGS}))
    lines = read_log(log)
    if lines:
        check_settings(log, lines[0], settings)
    done = {(c["round"], c["concurrency"], c["arm"]) for c in lines if "arm" in c}
    planned = schedule([arm.name for arm in arms], args.concurrency, args.shown, args.rounds, args.seed)
    todo = [cell for cell in planned if cell not in done]
    if not todo and not untraced:
        return lines, todo, None
    start = environment()
    enable_compilation_cache(args.compilation_cache_dir, print)
    run = Run(args)
    start |= run.weights()
    if lines:
        check_same(log, lines[0], start)
    else:  # prompts and models could be read: only now there is a run that can be gone on with
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"settings": settings, **start}]
        write_whole(log, json.dumps(lines[0]) + "\n")
    run.build(arms, fresh=len(lines) == 1)
    return lines, todo, run


def run_cells(run: Run, lines: list[Line], todo: list[tuple[int, int, str]], log: Path) -> None:
    """Adds what is left to run to ``lines`` and to the log."""
    measured = {line["round"] for line in lines if "step_times" in line}
    for i, (number, users, arm) in enumerate(todo):
        if number not in measured:
            measured.add(number)
            lines.append(run.measure(number))
            append(log, lines[-1])
        lines.append(run.cell(number, users, arm))
        append(log, lines[-1])
        speed, busy = lines[-1]["tokens"] / lines[-1]["seconds"], lines[-1]["load_average"]
        what = f"round {number}, {users} users, {arm}"
        run.say(f"cell {i + 1}/{len(todo)}: {what}: {speed:.1f} tokens/s, load average {busy[0]} to {busy[1]}")


if __name__ == "__main__":
    raise SystemExit(main())
