"""Does deciding drafts by load pay? Throughput of a real engine at several numbers of concurrent users, by arm.

    python benchmarks/bench_load.py --prompts mt-bench.jsonl gsm8k.jsonl humaneval.jsonl \
        --out benchmarks/results/load_smollm2 --traces 96

Closed loop: every user asks again as soon as it is answered. Arms: no speculation, fixed numbers of drafts, a static
confidence threshold, the adaptive scheduler (mode ``lagged``). A cell is one arm at one concurrency for --seconds after
its warm-up; a round has every cell once, in random order; --shown concurrencies run in the first round only. The same
prompts and seeds for every arm. All programs are compiled, and step times measured, before the first cell.

Writes OUT.jsonl cell by cell: started again with the same settings the command goes on where it was, and with nothing
left to do it only writes OUT.json, OUT.md and OUT.png anew. OUT_step_times/ holds each arm's measured step times, and
OUT_traces.npz (--traces N requests) what the simulator replays. At the default temperature 0 all arms write the same
texts. `--target tiny --seconds 1` tries the command out.
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
from serving.engines import build, load_models
from serving.figures import serving_figure
from serving.load_analysis import analyse
from serving.load_report import markdown
from serving.record import record
from serving.workload import Workload, read

from dspark_jax import Engine, Sampling
from dspark_jax.serve.startup import enable_compilation_cache


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
    parser.add_argument("--traces", type=int, default=0, help="requests to record for the simulator, once")
    parser.add_argument("--trace-users", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compilation-cache-dir", help='"": none; default: the user\'s cache directory')
    return parser.parse_args(arguments)


SETTINGS = (
    "prompts", "target", "drafter", "concurrency", "shown", "rounds", "seconds", "warm_seconds", "fixed", "threshold",
    "temperature", "verification", "max_new_tokens", "max_model_len", "max_programs", "seed",
)  # fmt: skip


def open_log(
    path: Path, settings: dict[str, Any], start: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and cells of a run that is there, or a new one. Raises ValueError where its settings are others."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings, **start}) + "\n", encoding="utf-8")
    header, *cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    changed = [
        f"{k} {header['settings'].get(k)!r} -> {v!r}" for k, v in settings.items() if header["settings"].get(k) != v
    ]
    if changed:
        raise ValueError(f"{path} holds a run with other settings ({'; '.join(changed)}): choose another --out")
    return header, cells


def append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Run:
    """Engines of all arms, and the cells they still have to run."""

    def __init__(self, args: argparse.Namespace, arms: tuple[Arm, ...], log: Path) -> None:
        self.args, self.log, self.begin = args, log, time.perf_counter()
        target, drafter = load_models(args.target, args.drafter)
        self.calibration = getattr(drafter, "calibration", None)
        longest = args.max_model_len - args.max_new_tokens - 16
        if args.prompts:
            prompts, kinds = read(args.prompts, target.tokenizer, longest)
        else:  # the tiny model has no tokenizer
            rng = np.random.default_rng(args.seed)
            prompts = tuple(tuple(rng.integers(0, 500, 24).tolist()) for _ in range(64))
            kinds = ("random",) * len(prompts)
        stops = () if target.tokenizer is None else tuple(target.config.eos_token_ids)
        sampling = Sampling(temperature=args.temperature)
        self.work = Workload(prompts, kinds, args.max_new_tokens, sampling, args.verification, stops, args.seed)
        self.engines: dict[str, Engine] = {}
        self.meters: dict[str, Meter] = {}
        users = sorted({*args.concurrency, *args.shown})
        for arm in arms:
            engine, table = build(
                arm, target, drafter, tables(args.out), concurrency=users, max_model_len=args.max_model_len,
                max_programs=args.max_programs, profile_seconds=args.profile_seconds, say=self.say,
            )  # fmt: skip
            self.engines[arm.name], self.meters[arm.name] = engine, Meter(table)
            engine.watch(self.meters[arm.name])

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {line}", flush=True)

    def prompts_ms(self) -> dict[str, float]:
        """Of every arm, by some prompts of the workload."""
        order = self.work.order(0x9807)
        requests = [self.work.request(next(order), i, 1) for i in range(16)]
        return {name: round(prompt_ms(engine, requests), 3) for name, engine in self.engines.items()}

    def cell(self, number: int, users: int, arm: str) -> dict[str, Any]:
        engine, args = self.engines[arm], self.args
        late = engine.counters()["late_compiles"]
        feed = self.work.feed(users, number, users)
        found = run_cell(engine, self.meters[arm], feed, users, args.seconds, warm_seconds=args.warm_seconds)
        late = engine.counters()["late_compiles"] - late
        return {"round": number, "concurrency": users, "arm": arm, **found, "late_compiles": late}


def tables(out: str) -> Path:
    return Path(f"{out}_step_times")


def finish(out: str, header: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    """Report files of the cells that are there."""
    settings = header["settings"]
    result = {**header, **analyse(cells, settings["concurrency"], settings["shown"])}
    Path(f"{out}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = markdown(result)
    Path(f"{out}.md").write_text(text, encoding="utf-8")
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
    arms = load_arms(args.fixed, args.threshold)
    settings = json.loads(json.dumps({name: getattr(args, name) for name in SETTINGS}))
    try:
        header, cells = open_log(log, settings, environment())
    except ValueError as error:
        print(error)
        return 2
    done = {(c["round"], c["concurrency"], c["arm"]) for c in cells if "arm" in c}
    planned = schedule([arm.name for arm in arms], args.concurrency, args.shown, args.rounds, args.seed)
    todo = [cell for cell in planned if cell not in done]
    if todo or (args.traces and not traces.is_file()):
        enable_compilation_cache(args.compilation_cache_dir, print)
        try:
            run = Run(args, arms, log)
        except (ValueError, OSError) as error:
            print(f"bench_load: {error}", file=sys.stderr)
            return 2
        if not any("prompt_ms" in line for line in cells):
            cells.append({"prompt_ms": run.prompts_ms()})
            append(log, cells[-1])
        for i, cell in enumerate(todo):
            cells.append(run.cell(*cell))
            append(log, cells[-1])
            speed, load = cells[-1]["tokens"] / cells[-1]["seconds"], cells[-1]["load_average"]
            what = f"round {cell[0]}, {cell[1]} users, {cell[2]}"
            run.say(f"cell {i + 1}/{len(todo)}: {what}: {speed:.1f} tokens/s, load average {load[0]} to {load[1]}")
        if args.traces and not traces.is_file():
            found = record(run.engines["threshold"], run.work, args.traces, args.trace_users, run.calibration, run.say)
            found.save(traces)
    header["prompt_ms"] = next((line["prompt_ms"] for line in cells if "prompt_ms" in line), {})
    finish(args.out, header, [line for line in cells if "arm" in line])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
