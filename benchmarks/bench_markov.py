"""The Markov scan with sampling against a straightforward one, side by side in one run.

    python benchmarks/bench_markov.py --vocab 49152 --rows 8 --drafts 7 --out benchmarks/results/markov_cpu.json

Ours is what a cycle runs behind the backbone: from base logits to tokens, their log-probabilities and what rebuilds a
row. The straightforward one is ``lax.scan`` over full logits with ``jax.random.categorical``; it returns the tokens and
all log-probabilities, which is what a verification by ``rejection`` needs ("tokens": the tokens alone). Runs alternate;
medians are compared.
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

from dspark_jax import Sampling
from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.cycle import DecodeState, Static
from dspark_jax.cycle_draws import DraftSampler
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.sampling import sampling_rows

TEMPERATURE = 1.0


def drafter_of(vocab: int, rank: int, hidden: int = 64) -> Drafter:
    """A vanilla Markov head on a backbone that is not run."""
    layer = LayerConfig(1, 64, RopeConfig())
    decoder = DecoderConfig(
        family="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=64, num_heads=1, layers=(layer,)
    )
    config = DrafterConfig(
        method="dspark", decoder=decoder, block_size=7, target_layer_ids=(0,), mask_token_id=0, markov_rank=rank
    )
    table = jnp.zeros((vocab, hidden))
    return Drafter.random(config, jax.random.key(0), embed=table, head=table)


def state_of(rows: int) -> DecodeState:
    """The small arrays of rows in the middle of a text."""
    zeros = jnp.zeros(rows, jnp.int32)
    return DecodeState(
        length=zeros + 100,
        anchor=zeros + 7,
        active=zeros == 0,
        seed=jnp.arange(rows, dtype=jnp.uint32),
        cycle=zeros + 3,
        coupled=zeros > 0,
        remaining=zeros + 100,
        stop_ids=zeros[:, None] - 1,
        sampling=sampling_rows(Sampling(temperature=TEMPERATURE), rows),
        rule=None,
        target=None,
        draft=None,
    )


def ours(drafter: Drafter, state: DecodeState, h: jax.Array, base: jax.Array) -> Any:
    """What ``Drafter.propose`` runs behind its backbone."""
    return drafter._one_by_one(h, base, state.anchor, DraftSampler(state, drafter, Static()))


def straightforward(drafter: Drafter, state: DecodeState, base: jax.Array, key: jax.Array, whole: bool) -> Any:
    """Full logits, ``jax.random.categorical``, and (``whole``) all log-probabilities."""
    w1, w2 = drafter.params["markov"]["w1"], drafter.params["markov"]["w2"]

    def step(previous: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        base_k, key_k = inputs
        logits = (base_k + w1[previous] @ w2.T) / TEMPERATURE
        token = jax.random.categorical(key_k, logits, axis=-1)
        return token, (token, jax.nn.log_softmax(logits, axis=-1) if whole else None)

    return jax.lax.scan(step, state.anchor, (base, jax.random.split(key, base.shape[0])))[1]


def alternate(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each side, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in sides.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--rank", default="64,256")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out")
    args = parser.parse_args()
    start, rows = environment(), []
    for rank in map(int, args.rank.split(",")):
        drafter, state = drafter_of(args.vocab, rank), state_of(args.rows)
        h = jnp.zeros((args.drafts, args.rows, 64))
        base = 3 * jax.random.normal(jax.random.key(1), (args.drafts, args.rows, args.vocab))
        one, two = jax.jit(ours), jax.jit(straightforward, static_argnames="whole")
        key = jax.random.key(2)
        times = alternate(
            {
                "ours": lambda: one(drafter, state, h, base),  # noqa: B023 - called in this turn of the loop
                "straightforward": lambda: two(drafter, state, base, key, whole=True),  # noqa: B023
                "tokens": lambda: two(drafter, state, base, key, whole=False),  # noqa: B023
            },
            args.repeats,
        )
        ms = {name: round(median(values), 2) for name, values in times.items()}
        row = {"rank": rank, "ms": ms, "speedup": round(ms["straightforward"] / ms["ours"], 2)}
        row["speedup_over_tokens_alone"] = round(ms["tokens"] / ms["ours"], 2)
        rows.append({**row, "all_ms": {name: [round(v, 2) for v in values] for name, values in times.items()}})
    shape = {"vocab": args.vocab, "rows": args.rows, "drafts": args.drafts, "temperature": TEMPERATURE}
    write(args.out, {**start, **shape, "runs": rows})


if __name__ == "__main__":
    main()
