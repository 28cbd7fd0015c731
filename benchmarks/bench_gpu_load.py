"""Throughput of the engine under load on random models of a published shape, with scripted acceptance: no drafts, whole
blocks, and the adaptive scheduler on step times measured here.

    python benchmarks/bench_gpu_load.py --shape qwen3-4b --users 1,8,32 --seconds 8 --out OUT.json

Closed loop: every user asks again as soon as it is answered. All forwards are run in full; only what is accepted, and
the confidences the scheduler sees, come from a trace (benchmarks/scripted.py). Few programs: one slot bucket an engine,
one context, layers as a scan where there is a GPU.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scripted
from bench_cycle import SHAPES, models
from report import environment, write

from dspark_jax import Engine, EngineConfig, Request, Sampling

ARMS = ("none", "fixed", "lagged")


def engine_of(models: tuple[Any, Any], mode: str, args: argparse.Namespace) -> Engine:
    window = args.prompt + args.new + 1
    config = EngineConfig(
        max_num_seqs=args.slots,
        max_model_len=window,
        mode=mode,
        slot_buckets=(args.slots,),
        prefill_buckets=(args.prompt,),
        max_programs=args.programs,
        profile_dir="",
        profile_seconds=args.profile_seconds,
        seed=0,
    )
    return Engine(*models, config)


def loop(engine: Engine, users: int, seconds: float, args: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Tokens a second and accepted length of ``users`` that keep asking, after a second to fill the slots."""
    rng = np.random.default_rng(0)

    def ask() -> None:
        prompt = rng.integers(0, vocab, args.prompt).tolist()
        engine.submit(Request(prompt, args.new, Sampling(0.0)))

    for _ in range(users):
        ask()
    begin = time.perf_counter()
    warm, tokens, cycles, committed = 1.0 if seconds > 2 else 0.0, 0, 0, 0
    while (now := time.perf_counter()) < begin + warm + seconds:
        for event in engine.step():
            if event.finished:
                ask()
            if now >= begin + warm:
                tokens += len(event.tokens)
                cycles += len(event.committed)
                committed += sum(event.committed)
    elapsed = time.perf_counter() - begin - warm
    engine.reset()
    return {
        "tokens_per_s": round(tokens / elapsed, 1),
        "tokens_per_s_and_user": round(tokens / elapsed / users, 1),
        "tokens_per_cycle": round(committed / max(cycles, 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--users", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    parser.add_argument("--trace", help="npz of benchmarks/bench_load.py; default: made up")
    parser.add_argument("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    target, drafter = models(SHAPES[args.shape], args.block, jnp.dtype(args.dtype))
    trace = scripted.load(args.trace) if args.trace else scripted.made_up(4096, args.block)
    both = scripted.scripted(target, drafter, trace)
    rows: list[dict[str, Any]] = []
    step_times = None
    for mode in ARMS:
        begin = time.perf_counter()
        engine = engine_of(both, mode, args)
        engine.warmup(print)
        ready = round(time.perf_counter() - begin, 1)
        if mode == "lagged":
            step_times = engine._times.table if engine._times is not None else None
        for users in map(int, args.users.split(",")):
            row = {"mode": mode, "users": users, **loop(engine, users, args.seconds, args, target.vocab_size)}
            row |= {"ready_s": ready, "late_compiles": engine.counters()["late_compiles"]}
            print(row, flush=True)
            rows.append(row)
        del engine
    profile = None
    if step_times is not None:
        profile = {
            "tokens": list(map(int, step_times.tokens)),
            "milliseconds": list(map(float, step_times.milliseconds)),
        }
    write(args.out, {**start, "shape": args.shape, "dtype": args.dtype, "acceptance": scripted.MARK,
                     "trace": args.trace or "made up", "rows": rows, "step_times": profile})  # fmt: skip


if __name__ == "__main__":
    main()
