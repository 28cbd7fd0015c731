"""How long does the scheduler take on the host, against a literal loop of Algorithm 1?

    python benchmarks/bench_schedule.py --slots 256 --width 16 --out benchmarks/results/schedule.json

Prints microseconds of a call (best of several rounds' means: what the machine can do, not what else it did)
and the ratio to the loop; checks that both give the same lengths. Goal: under 200 microseconds for 256 x 16.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from dspark_jax.schedule import StepTimeTable, admit_early_stop, admit_top_k, capacity  # noqa: E402
from dspark_jax.schedule import survival as survival_of  # noqa: E402
from dspark_jax.schedule.choice import choose  # noqa: E402


def literal_early_stop(survival: np.ndarray, table: StepTimeTable) -> list[int]:
    """Algorithm 1 as the paper prints it: sort, admit one after the other, stop at the first loss."""
    slots, width = survival.shape
    rows = survival.tolist()
    order = sorted((-rows[r][k], r, k) for r in range(slots) for k in range(width) if rows[r][k] > 0)
    lengths, expected, tokens = [0] * slots, float(slots), slots
    theta = expected / table.ms(tokens)
    for negative, slot, _ in order:
        expected, tokens = expected - negative, tokens + 1
        if tokens > table.last or expected / table.ms(tokens) <= theta:
            break
        theta = expected / table.ms(tokens)
        lengths[slot] += 1
    return lengths


def microseconds(call: Callable[[], object], number: int, rounds: int = 100) -> float:
    """Many short rounds: one of them may find the machine at rest."""
    return 1e6 * min(timeit.repeat(call, number=number, repeat=rounds)) / number


def commit() -> str | None:
    """Of the working tree, with a + where it has changes; None outside a repository."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def measure(slots: int, width: int, seed: int) -> dict[str, float | int]:
    """Microseconds of each function, and of the loop, on one random batch."""
    rng = np.random.default_rng(seed)
    survival = survival_of(rng.uniform(0.5, 1.0, (slots, width)))
    last = slots * (1 + width)
    buckets = np.unique(np.geomspace(1, last, 24).astype(int))
    table = StepTimeTable(tokens=buckets, milliseconds=20.0 + 0.005 * buckets)
    lengths = admit_early_stop(survival, table)
    if lengths.tolist() != literal_early_stop(survival, table):
        raise RuntimeError("the vectorised Algorithm 1 and the loop disagree")
    # A staircase stops Algorithm 1 at its first step; a slope makes both walk most of the path.
    slope = StepTimeTable(tokens=range(1, last + 1), milliseconds=20.0 + 0.005 * np.arange(1, last + 1))
    walked = admit_early_stop(survival, slope)
    if walked.tolist() != literal_early_stop(survival, slope):
        raise RuntimeError("the vectorised Algorithm 1 and the loop disagree")
    drafts = capacity(survival, table)
    single = survival.astype(np.float32)
    result: dict[str, float | int] = {
        "admitted_staircase": int(lengths.sum()),
        "admitted_slope": int(walked.sum()),
        "capacity_drafts": drafts,
        "survival_us": microseconds(lambda: survival_of(survival), 20),
        "capacity_us": microseconds(lambda: capacity(survival, table, 1.0), 20),
        "choose_us": microseconds(lambda: choose(survival, table, 1.0, min_gain=0.05), 20),
        "choose_with_floor_us": microseconds(lambda: choose(survival, table, 1.0, floor_per_ms=0.02), 20),
        "choose_with_floor_missed_us": microseconds(lambda: choose(survival, table, 1.0, floor_per_ms=1.0), 20),
        "capacity_float32_us": microseconds(lambda: capacity(single, table, 1.0), 20),
        "admit_top_k_us": microseconds(lambda: admit_top_k(survival, drafts), 20),
        "early_stop_us": microseconds(lambda: admit_early_stop(survival, slope), 20),
        "literal_early_stop_us": microseconds(lambda: literal_early_stop(survival, slope), 1, 20),
    }
    result["literal_over_vectorised"] = result["literal_early_stop_us"] / result["early_stop_us"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--width", type=int, default=16, help="positions of a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    result = measure(args.slots, args.width, args.seed)
    print(f"{args.slots} x {args.width}, {result['admitted_slope']} drafts admitted by Algorithm 1")
    for name, value in result.items():
        if name.endswith("_us"):
            print(f"  {name[:-3]:24s}{value:12.1f} us")
    print(f"  loop / vectorised       {result['literal_over_vectorised']:12.1f}")
    if args.out is not None:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.platform()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "slots": args.slots,
            "width": args.width,
            "seed": args.seed,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, **result}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")


if __name__ == "__main__":
    main()
