"""Milliseconds of a whole decoding cycle of random models of a given shape, on whatever device there is.

    python benchmarks/bench_cycle.py --shape qwen3-0.6b --batch 1,8,32 --out OUT.json

Weights are random, so next to nothing is accepted: read the milliseconds, and tokens/s of plain decoding. For each
batch: one plain step (T = B tokens), one cycle of drafting and verifying a whole block (T = B * (G + 1)), and what a
given accepted length would make of it.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import environment, write

from dspark_jax import Sampling, generate
from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.drafters import Drafter
from dspark_jax.targets import Target

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "d": 64, "ff": 128, "heads": 4, "kv": 2, "head": 16, "vocab": 512, "rank": 16, "draft": 2},
    "qwen3-0.6b": {
        "layers": 28, "d": 1024, "ff": 3072, "heads": 16, "kv": 8, "head": 128, "vocab": 151936, "rank": 256, "draft": 5
    },
    "qwen3-4b": {
        "layers": 36, "d": 2560, "ff": 9728, "heads": 32, "kv": 8, "head": 128, "vocab": 151936, "rank": 256, "draft": 5
    },
}  # fmt: skip


def models(shape: dict[str, int], block: int, dtype: Any) -> tuple[Target, Drafter]:
    """A random target and DSpark drafter."""
    layer = LayerConfig(shape["kv"], shape["head"], RopeConfig(theta=1e6))
    config = DecoderConfig(
        family="qwen3",
        vocab_size=shape["vocab"],
        hidden_size=shape["d"],
        intermediate_size=shape["ff"],
        num_heads=shape["heads"],
        layers=(layer,) * shape["layers"],
        qk_norm=True,
        tie_embeddings=True,
        max_positions=40960,
    )
    target = Target.random(config, jax.random.key(0), dtype)
    n = shape["layers"]
    drafter_config = DrafterConfig(
        method="dspark",
        decoder=DecoderConfig(**{**vars(config), "layers": (layer,) * shape["draft"]}),
        block_size=block,
        target_layer_ids=tuple(sorted({1, n // 4, n // 2, 3 * n // 4, n - 3} - {n - 1})),
        mask_token_id=0,
        markov_rank=shape["rank"],
        confidence_head=True,
    )
    table = target.params["embed_tokens"]
    return target, Drafter.random(drafter_config, jax.random.key(1), embed=table, head=table)


def cycle_ms(target: Target, drafter: Drafter | None, batch: int, prompt: int, tokens: int, repeats: int) -> float:
    """Median milliseconds of a cycle: decoding alone, the prefill (a run of one token) taken off."""
    prompts = jax.random.randint(jax.random.key(2), (batch, prompt), 0, target.vocab_size)
    lengths = jnp.full(batch, prompt, jnp.int32)

    def run(n: int) -> tuple[float, int]:
        begin = time.perf_counter()
        out = generate(
            target,
            drafter,
            prompts,
            lengths,
            seeds=jnp.arange(batch, dtype=jnp.uint32),
            max_new_tokens=n,
            sampling=Sampling(temperature=1.0),
        )
        cycles = int(np.max(np.sum(np.asarray(out.committed) > 0, axis=1)))
        return time.perf_counter() - begin, cycles

    run(1), run(tokens)
    values = []
    for _ in range(repeats):
        short, _ = run(1)
        long, cycles = run(tokens)
        values.append(1e3 * (long - short) / max(cycles, 1))
    return median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    target, drafter = models(SHAPES[args.shape], args.block, jnp.dtype(args.dtype))
    rows = []
    for batch in map(int, args.batch.split(",")):
        plain = cycle_ms(target, None, batch, args.prompt, args.tokens, args.repeats)
        cycle = cycle_ms(target, drafter, batch, args.prompt, args.tokens, args.repeats)
        row = {
            "batch": batch,
            "plain_ms": round(plain, 3),
            "cycle_ms": round(cycle, 3),
            "plain_tokens_per_s": round(1e3 * batch / plain, 1),
            "break_even_accepted_length": round(cycle / plain, 2),
            "tokens_per_s_at_accepted_length_3": round(3e3 * batch / cycle, 1),
        }
        print(row, flush=True)
        rows.append(row)
    write(args.out, {**start, "shape": args.shape, "block": args.block, "dtype": args.dtype, "rows": rows})


if __name__ == "__main__":
    main()
