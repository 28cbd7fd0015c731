"""The Pallas kernels of this device against their XLA reference and the roofline, in microseconds.

    python benchmarks/bench_kernels.py --shape qwen3-8b --rows 1,8,64 --out OUT.json

``markov_sample`` drafts a block of 7, ``verify`` reads the target's logits of the rows' 8 places. Each figure is the
median of ``--repeats`` runs of ``--inner`` calls that wait for one another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import roofline
from published import RANK, TARGETS
from report import environment, write

from pallas_kernels import triton_call
from pallas_kernels.markov_sample import Block, Head, markov_sample
from pallas_kernels.verify import Rows, row_statistics

BLOCK = 7
TINY = {"vocab": 512, "d": 64, "rank": 64}


def timed_us(f: Callable[..., Any], arguments: tuple[Any, ...], repeats: int, inner: int) -> float:
    run = jax.jit(f)
    jax.block_until_ready(run(*arguments))
    values = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            out = run(*arguments)
        jax.block_until_ready(out)
        values.append(1e6 * (time.perf_counter() - begin) / inner)
    return round(median(values), 1)


def head_arguments(rows: int, size: dict[str, int]) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape, jnp.bfloat16)

    v, d, r = size["vocab"], size["d"], size["rank"]
    words = jax.random.bits(next(keys), (BLOCK, rows), jnp.uint32)
    head = Head(normal(v, r), normal(v, r), confidence=normal(1, d + r), confidence_bias=jnp.zeros(1, jnp.bfloat16))
    base, hidden = normal(BLOCK, rows, v), normal(BLOCK, rows, d)
    first, temperature = jnp.zeros(rows, jnp.int32), jnp.ones(rows, jnp.float32)
    return head, Block(base, hidden, first, temperature, words, words, None)


def verify_arguments(rows: int, size: dict[str, int]) -> tuple[Any, ...]:
    count = rows * (BLOCK + 1)
    logits = jax.random.normal(jax.random.key(1), (count, size["vocab"]), jnp.float32)
    ones, words = jnp.ones(count, jnp.float32), jax.random.bits(jax.random.key(2), (count,), jnp.uint32)
    return (Rows(logits, ones, ones, words, words, jnp.zeros(count, jnp.int32)),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", *TARGETS), default="qwen3-8b")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inner", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    size = TINY
    if args.shape != "tiny":
        config = TARGETS[args.shape]
        size = {"vocab": config.vocab_size, "d": config.hidden_size, "rank": RANK}
    triton = () if triton_call.missing() else ("triton",)
    backends = {"cpu": (), "gpu": ("mosaic_gpu", *triton), "tpu": ("tpu",)}[jax.default_backend()]
    h200 = "H200" in jax.devices()[0].device_kind
    ceilings = roofline.DEVICES["h200-sxm" if h200 else "h100-sxm"]
    table = []
    for rows in map(int, args.rows.split(",")):
        for op, call, arguments, floor in (
            ("markov_sample", markov_sample, head_arguments(rows, size),
             roofline.head(rows, BLOCK, size["vocab"], size["rank"])),
            ("verify", row_statistics, verify_arguments(rows, size),
             roofline.verification(rows, BLOCK + 1, size["vocab"])),
        ):  # fmt: skip
            row: dict[str, Any] = {"op": op, "rows": rows, "floor_us": round(floor.floor_us(ceilings), 1)}
            for backend in ("xla", *backends):
                try:
                    run = lambda *a, call=call, backend=backend: call(*a, implementation=backend)  # noqa: E731
                    row[f"{backend}_us"] = timed_us(run, arguments, args.repeats, args.inner)
                except Exception as error:  # one kernel's failure is a figure too
                    row[f"{backend}_us"] = f"failed: {str(error)[:200]}"
            print(row, flush=True)
            table.append(row)
    write(args.out, {**start, "shape": args.shape, "ceilings": "h200-sxm" if h200 else "h100-sxm", "rows": table})


if __name__ == "__main__":
    main()
