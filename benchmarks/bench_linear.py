"""Which form of a matrix product is fast on this backend, by number of tokens?

    python benchmarks/bench_linear.py --out benchmarks/results/linear.json

Times the projections of SmolLM2-135M (30 layers and the head, one after the other, so that weights come from
memory) in three forms: weight as the right operand, weight as the left operand, and a fused multiply-and-sum. All
forms run in one process, in turn; the median of the rounds and the ratio to the form that ``nn/linear.py`` takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from report import environment, write

from dspark_jax.nn.linear import linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
_LAST = (((1,), (1,)), ((), ()))
_HIGHEST = jax.lax.Precision.HIGHEST

FORMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "linear": linear,
    "right": lambda w, x: jax.lax.dot_general(x, w, _LAST, _HIGHEST),
    "left": lambda w, x: jax.lax.dot_general(w, x, _LAST, _HIGHEST).T,
    "sum": lambda w, x: jnp.sum(w[:, None, :] * x[None, :, :], axis=-1).T,
}


def chain(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, Any, jax.Array], jax.Array]:
    """All projections of a decoding step, each fed by the one before."""

    def run(x: jax.Array, layers: Any, head: jax.Array) -> jax.Array:
        for qkv, out, up, down in layers:
            x = x + product(out, product(qkv, x / (1 + jnp.abs(x)))[:, : out.shape[1]])
            both = product(up, x / (1 + jnp.abs(x)))
            x = x + product(down, both[:, : down.shape[1]] * both[:, down.shape[1] :])
        return product(head, x)

    return jax.jit(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    keys = iter(jax.random.split(jax.random.key(0), 4 * args.layers + 1))
    layers = [[0.03 * jax.random.normal(next(keys), shape) for shape in SHAPES] for _ in range(args.layers)]
    head = jax.random.normal(next(keys), HEAD)
    milliseconds: dict[int, dict[str, float]] = {}
    for tokens in map(int, args.tokens.split(",")):
        x = jax.random.normal(jax.random.key(1), (tokens, 576))
        forms = {name: chain(f) for name, f in FORMS.items() if not (name == "sum" and tokens == 1)}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for f in forms.values():
            jax.block_until_ready(f(x, layers, head))
        for _ in range(args.rounds):
            for name, f in forms.items():
                begin = time.perf_counter()
                jax.block_until_ready(f(x, layers, head))
                times[name].append(1e3 * (time.perf_counter() - begin))
        milliseconds[tokens] = {name: round(median(values), 2) for name, values in times.items()}
        print(tokens, milliseconds[tokens], flush=True)
    write(args.out, {**start, "median_ms": milliseconds})


if __name__ == "__main__":
    main()
