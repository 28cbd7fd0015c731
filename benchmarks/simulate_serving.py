"""How would this scheduler serve on hardware, and under loads, that are not here? A discrete-event simulation.

    python benchmarks/simulate_serving.py curves --step-time configs/step_time/h100-sxm_qwen3-8b_0.6.json \
        --out benchmarks/results/simulate_h100
    python benchmarks/simulate_serving.py validate --load benchmarks/results/load_smollm2 \
        --out benchmarks/results/simulate_validation

``curves``: throughput against tokens/s/user and budget against load (the shapes of the paper's Figures 7 and 8), closed
loop, for no speculation, MTP-1, fixed numbers of drafts, a static threshold and the adaptive scheduler, which is the
engine's own code; with --rates also Poisson arrivals; and one change from code to chat in the middle of all texts:
cycles until the budget follows, for ``lagged`` and for ``current`` (of requests that are ``coupled``). Prompts are
taken to run elsewhere. Acceptance: --traces FILE.npz recorded by bench_load.py, else made up (serving/synthetic.py has
the recipe). ``validate``: the simulated engine against the cells of bench_load.py on this machine, from the
step times, prompt times and traces that it wrote; the status is 1 where one differs by more than 15 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from report import environment
from serving.arms import ADAPTIVE, load_arms, simulated_arms
from serving.figures import serving_figure
from serving.load_report import table
from serving.simulator import Clock
from serving.studies import bars, closed_curve, poisson_curve, rises, switch, validate
from serving.synthetic import CONDITIONAL, SPREAD, synthetic
from serving.traces import Traces

from dspark_jax.schedule import StepTimeTable

LEAST_RATIO, MOST_LOAD, WOBBLE = 0.99, 512, 0.03
KNOWN_DIFFERENCE = (
    "all arms replay traces of whole blocks; the engines of the fixed arms draft in blocks of their own number, whose "
    "drafts may differ from the first ones of a whole block"
)
COLUMNS = {
    "arm": "arm",
    "concurrency": "concurrent",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_user": "tokens/s/user",
    "drafts_per_request": "drafts a request",
    "acceptance": "accepted",
    "cycle_ms": "cycle ms",
}


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def positive(text: str) -> tuple[int, ...]:
    found = integers(text)
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"positive numbers are expected, found {text!r}")
    return found


def floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part.strip())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="study", required=True)
    curves = commands.add_parser("curves", help="loads of a table's hardware")
    curves.add_argument("--step-time", required=True, help="a StepTimeTable file")
    curves.add_argument("--measured", action="store_true", help="the table was measured by an engine")
    curves.add_argument("--context", type=int, default=1024, help="cache cells a request")
    curves.add_argument("--loads", type=positive, default=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000))
    curves.add_argument("--rates", type=floats, default=(), help="Poisson arrivals, requests per second")
    curves.add_argument("--poisson-seconds", type=float, default=600.0)
    curves.add_argument("--fixed", type=integers, default=(1, 3, 5, 7))
    curves.add_argument("--threshold", type=float, default=0.5)
    curves.add_argument("--mtp-draft", type=float, default=0.2, help="an MTP-1 draft over one of the table's drafter")
    curves.add_argument("--traces", help="recorded ones; default: made up")
    curves.add_argument("--conditional", type=floats, help="acceptances by position instead of the built-in ones")
    curves.add_argument("--spread", type=float, default=SPREAD)
    curves.add_argument("--request-cycles", type=int, default=100_000)
    curves.add_argument("--switch-users", type=int, default=64)
    curves.add_argument("--switch-runs", type=int, default=32)
    curves.add_argument("--seed", type=int, default=0)
    curves.add_argument("--out", required=True, help="results without their endings")
    check = commands.add_parser("validate", help="against bench_load.py on this machine")
    check.add_argument("--load", required=True, help="the --out of bench_load.py")
    check.add_argument("--seconds", type=float, default=300.0, help="simulated, of each cell")
    check.add_argument("--out", required=True)
    return parser.parse_args(arguments)


def traces_of(args: argparse.Namespace) -> tuple[Traces, dict[str, Any]]:
    """Traces, and a word about them."""
    if args.traces:
        found = Traces.load(args.traces)
        about: dict[str, Any] = {"file": args.traces}
    else:
        conditional = {"all": args.conditional} if args.conditional else CONDITIONAL
        found = synthetic(conditional, spread=args.spread, seed=args.seed)
        about = {"conditional": {k: list(v) for k, v in conditional.items()}, "spread": args.spread}
    mean = {
        kind: {
            "conditional_acceptance": found.of(kind).position_acceptance(),
            "tokens_a_cycle_whole_blocks": round(1.0 + float(found.of(kind).accepted.mean()), 3),
        }
        for kind in sorted(set(found.kinds))
    }
    return found, {**about, "texts": found.texts, "rows": len(found.accepted), "by_kind": mean}


def check_loads(args: argparse.Namespace, times: StepTimeTable) -> None:
    """Raises ValueError for loads that the table says nothing of: beyond its slots a batch would cost what they do."""
    if args.switch_users < 1 or args.switch_runs < 1:
        raise ValueError("--switch-users and --switch-runs: positive numbers are expected")
    rows = times.rows or (times,)
    slots = [row.slots for row in rows if row.slots is not None]
    for name, users in (("--loads", max(args.loads)), ("--switch-users", args.switch_users)):
        if len(slots) == len(rows) and users > max(slots):
            raise ValueError(f"{name}: {users} requests at once, but {args.step_time} ends at {max(slots)} slots")


def run_curves(args: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    times = StepTimeTable.load(args.step_time)
    check_loads(args, times)
    traces, about = traces_of(args)
    if wrong := [count for count in args.fixed if not 1 <= count <= traces.width]:
        raise ValueError(f"--fixed: {wrong[0]} drafts, but a block of these traces has 1 to {traces.width}")
    first = dataclasses.replace(
        traces,
        survival=traces.survival[:, :1],
        accepted=traces.accepted.clip(max=1),
        temperature=traces.temperature[:1],
    )
    drafters = {
        "dspark": (traces, Clock(times, args.context, args.measured)),
        "mtp": (first, Clock(times, args.context, args.measured, args.mtp_draft)),
    }
    rows: list[dict[str, Any]] = []
    poisson: list[dict[str, Any]] = []
    for arm in simulated_arms(args.fixed, args.threshold):
        rows += closed_curve(
            arm, *drafters[arm.drafter], args.loads, request_cycles=args.request_cycles, seed=args.seed
        )
        if args.rates:
            poisson += poisson_curve(
                arm,
                *drafters[arm.drafter],
                args.rates,
                seconds=args.poisson_seconds,
                slots=max(args.loads),
                seed=args.seed,
            )
        print(f"[{time.perf_counter() - begin:6.1f} s] {arm.name}", flush=True)
    found = bars(rows, args.loads)
    judged = [bar for bar in found if bar["concurrency"] <= MOST_LOAD]
    kinds = sorted(set(traces.kinds))
    changes = []
    if {"code", "chat"} <= set(kinds):
        for arm in (ADAPTIVE, dataclasses.replace(ADAPTIVE, name="current", mode="current")):
            clock = drafters["dspark"][1]
            before, after = traces.of("code"), traces.of("chat")
            changes.append(switch(arm, before, after, clock, args.switch_users, runs=args.switch_runs, seed=args.seed))
    simulated = sum(row["simulated_s"] for row in [*rows, *poisson])
    wall = time.perf_counter() - begin
    return {
        "step_time": {
            "file": args.step_time,
            "machine": times.machine,
            "device": times.device,
            "model": times.model_hash,
        },
        "context": args.context,
        "traces": about,
        "bars": found,
        "ratio_ok": all(bar["ratio"] >= LEAST_RATIO for bar in judged),
        "drafts_rise_at": rises(judged, WOBBLE),
        "switch": changes,
        "simulated_hours": round(simulated / 3600, 2),
        "wall_minutes": round(wall / 60, 2),
        "arms": rows,
        "poisson": poisson,
    }


def curves_markdown(result: dict[str, Any]) -> str:
    """The curves as a page."""
    about = result["step_time"]
    lines = [
        "# Serving, simulated",
        "",
        f"{about['model']} on {about['device']} ({about['machine']}), {result['context']} cache cells a request; "
        f"{result['simulated_hours']:g} simulated hours in {result['wall_minutes']:g} minutes; "
        f"commit {result['commit']}.",
        "",
        f"`{result['command']}`",
        "",
        f"Adaptive over the best fixed number of drafts at loads up to {MOST_LOAD}, at least {LEAST_RATIO} everywhere: "
        f"{'yes' if result['ratio_ok'] else 'no'}. Drafts a request fall with load (to a "
        f"level where steps are bound by arithmetic; a rise of {WOBBLE:.0%} would count): "
        f"{'yes' if not result['drafts_rise_at'] else 'not at ' + ', '.join(map(str, result['drafts_rise_at']))}.",
        "",
    ]
    lines += table(
        result["bars"],
        {"concurrency": "concurrent", "best_fixed": "best fixed arm", "ratio": "adaptive / best",
         "drafts_per_request": "drafts a request"},
    )  # fmt: skip
    if result["switch"]:
        lines += ["", "All texts change from code to chat in one cycle; cycles until the budget has followed:", ""]
        lines += table(
            result["switch"],
            {"mode": "mode", "concurrency": "concurrent", "budget_before": "drafts before", "budget_after": "after",
             "half_way": "cycles to half of the way", "nine_tenths": "to nine tenths"},
        )  # fmt: skip
    for kind, values in result["traces"]["by_kind"].items():
        lines += ["", f"Acceptance, {kind}: {values['conditional_acceptance']} given those before; "
                  f"{values['tokens_a_cycle_whole_blocks']} tokens a cycle of whole blocks."]  # fmt: skip
    lines += ["", "## Closed loop", "", *table(result["arms"], COLUMNS)]
    if result["poisson"]:
        columns = {"rate": "requests/s", "mean_active": "active", "mean_latency_s": "latency s", **COLUMNS}
        columns.pop("concurrency")
        lines += ["", "## Poisson arrivals", "", *table(result["poisson"], columns)]
    return "\n".join(lines) + "\n"


def run_validate(args: argparse.Namespace) -> dict[str, Any]:
    """The cells that carry bars, simulated."""
    load = json.loads(Path(f"{args.load}.json").read_text(encoding="utf-8"))
    settings = load["settings"]
    arms = load_arms(settings["fixed"], settings["threshold"])
    tables = {
        arm.name: StepTimeTable.load(Path(f"{args.load}_step_times") / f"{arm.name.replace(' ', '_')}.json")
        for arm in arms
    }
    measured = {
        (row["arm"], row["concurrency"]): row["tokens_per_s"]
        for row in load["arms"]
        if row["concurrency"] in settings["concurrency"]
    }
    rows = validate(
        arms, Traces.load(f"{args.load}_traces.npz"), tables, load["prompt_ms"], measured,
        context=settings["max_model_len"], seconds=args.seconds,
    )  # fmt: skip
    return {"load": args.load, "rows": rows, "ok": all(row["ok"] for row in rows), "known_difference": KNOWN_DIFFERENCE}


def validation_markdown(result: dict[str, Any]) -> str:
    columns = {"arm": "arm", "concurrency": "concurrent", "measured": "measured tokens/s", "simulated": "simulated",
               "ratio": "ratio", "drafts_per_request": "drafts a request (simulated)", "ok": "within 15 %"}  # fmt: skip
    head = ["# The simulated engine against the real one", "", f"`{result['command']}`, commit {result['commit']}", ""]
    tail = ["", f"Known difference: {result['known_difference']}."]
    return "\n".join([*head, *table(result["rows"], columns), *tail]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Runs a study and writes OUT.json and OUT.md, curves also OUT.png. Returns the exit status: 1 where a validation
    fails, 2 for input that is wrong."""
    args = parse(arguments)
    try:
        return study(args)
    except (ValueError, OSError) as error:
        print(f"simulate_serving: {error}", file=sys.stderr)
        return 2


def study(args: argparse.Namespace) -> int:
    """See ``main``."""
    start = environment()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.study == "curves":
        result = {**start, **run_curves(args)}
        text = curves_markdown(result)
        about = result["step_time"]
        title = f"simulated: {about['model']} on {about['device']}, {about['machine']}"
        serving_figure(Path(f"{args.out}.png"), result["arms"], title, log=True)
        status = 0
    else:
        result = {**start, **run_validate(args)}
        text, status = validation_markdown(result), int(not result["ok"])
    Path(f"{args.out}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    Path(f"{args.out}.md").write_text(text, encoding="utf-8")
    print(text)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
