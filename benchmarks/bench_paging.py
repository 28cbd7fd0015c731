"""What does a step cost that reads its context through a table of pages, and what does copying a known prefix cost?

    python benchmarks/bench_paging.py --out benchmarks/results/paging.json

Attention of one query a request over caches of SmolLM2-135M's shape (3 heads of 64, float32), one array a layer so that
keys and values come from memory: read as the engine reads them (the first cells of neighbouring slots), and gathered by
pages of 16 tokens that lie anywhere in a pool, the heads' axis moved to its place or left where it is. All forms run in
one process, in turn; medians of the rounds, in milliseconds for 30 layers. Then the engine's own copy program: blocks
of 16 tokens from the store to a slot, and back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import environment, write

from dspark_jax.config import LayerConfig, RopeConfig
from dspark_jax.cycle import Static
from dspark_jax.engine.buckets import plan_buckets
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.prefix_cache import BLOCK
from dspark_jax.engine.programs import Programs
from dspark_jax.kv_cache import init_cache, read_rows
from dspark_jax.layout import dense_layout
from dspark_jax.nn.attention import KeyBlock, attention, causal_visible

SLOTS, WINDOW, HEADS, LAYERS = 8, 2048, 9, 30
LAYER = LayerConfig(num_kv_heads=3, head_dim=64, rope=RopeConfig())


class CacheOnly:
    """As much of a target as copying needs."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def init_cache(self, slots: int, length: int) -> Any:
        return init_cache((LAYER,) * self.layers, slots, length, jnp.float32)


def forms(rows: int, context: int) -> dict[str, Callable[..., jax.Array]]:
    """Attention of all layers by the way in which the context is read."""
    layout = dense_layout(jnp.full(rows, context - 1, jnp.int32), jnp.ones(rows, jnp.int32), 1)
    visible = causal_visible(layout.start, 1, context, 0)
    pages = context // BLOCK

    def slots(q: jax.Array, cells: jax.Array, table: jax.Array) -> jax.Array:
        return read_rows(cells, layout, context)

    def moved(q: jax.Array, pool: jax.Array, table: jax.Array) -> jax.Array:
        found = pool[table[:rows, :pages]]  # [R, P, Hk, BLOCK, D]
        return found.transpose(0, 2, 1, 3, 4).reshape(rows, 3, context, 64)

    def whole(read: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(q: jax.Array, keys: Any, values: Any, table: jax.Array) -> jax.Array:
            for k, v in zip(keys, values, strict=True):
                out = attention(q, [KeyBlock(read(q, k, table), read(q, v, table), visible)], 0.125)
                q = q + 0.1 * out
            return q

        return jax.jit(run)

    def kept(q: jax.Array, keys: Any, values: Any, table: jax.Array) -> jax.Array:
        high = jax.lax.Precision.HIGHEST
        for k, v in zip(keys, values, strict=True):
            k, v = k[table[:rows, :pages]], v[table[:rows, :pages]]
            grouped = q.reshape(rows, 3, 3, 64)
            scores = 0.125 * jnp.einsum("rhmd,rphcd->rhmpc", grouped, k, precision=high)
            weights = jax.nn.softmax(scores.reshape(rows, 3, 3, -1)).reshape(scores.shape)
            q = q + 0.1 * jnp.einsum("rhmpc,rphcd->rhmd", weights, v, precision=high).reshape(q.shape)
        return q

    return {"slots": whole(slots), "pages": whole(moved), "pages, heads inside": jax.jit(kept)}


def timed(f: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(f())
    return 1e3 * (time.perf_counter() - begin)


def reads(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of 30 layers' attention, by requests and context."""
    key = jax.random.key(0)
    make = jax.jit(lambda k, shape: jax.random.normal(k, shape), static_argnums=1)
    slots = [make(k, (SLOTS, 3, WINDOW, 64)) for k in jax.random.split(key, 2 * layers)]
    pools = [make(k, (SLOTS * WINDOW // BLOCK, 3, BLOCK, 64)) for k in jax.random.split(key, 2 * layers)]
    order = np.random.default_rng(0).permutation(SLOTS * WINDOW // BLOCK).astype(np.int32)
    table = jnp.asarray(order.reshape(SLOTS, -1))
    found: dict[str, dict[str, float]] = {}
    for rows, context in ((1, 512), (1, 2048), (4, 512), (8, 512), (8, 2048)):
        q = jax.random.normal(key, (rows, 1, HEADS, 64))
        todo = {}
        for name, form in forms(rows, context).items():
            cells = slots if name == "slots" else pools
            todo[name] = lambda form=form, cells=cells, q=q: form(q, cells[:layers], cells[layers:], table)
        times: dict[str, list[float]] = {name: [] for name in todo}
        for run in todo.values():
            jax.block_until_ready(run())
        for _ in range(rounds):
            for name, run in todo.items():
                times[name].append(timed(run))
        found[f"{rows} x {context}"] = {n: round(median(t) * LAYERS / layers, 2) for n, t in times.items()}
        print(rows, context, found[f"{rows} x {context}"], flush=True)
    return found


def copies(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of 30 layers' copies, by tokens."""
    config = EngineConfig(mode="none")
    buckets = plan_buckets(
        config, window=WINDOW, drafts=0, variable=False, skips=False, budget=24, stored_blocks=2 * WINDOW // BLOCK
    )
    programs = Programs(
        CacheOnly(layers),  # type: ignore[arg-type]
        None,
        buckets,
        slots=SLOTS,
        stop_ids=16,
        rule="all",
        max_positions=WINDOW,
        static=Static(),
    )
    state = programs.init_state()
    times: dict[str, dict[str, list[float]]] = {}
    for round_ in range(rounds + 1):
        for tokens in (16, 256, 1024):
            rows = list(range(tokens // BLOCK))
            begin = time.perf_counter()
            state = jax.block_until_ready(programs.load(state, 1, 0, rows))
            middle = time.perf_counter()
            state, sound = jax.block_until_ready(programs.save(state, 2, 0, rows))
            end = time.perf_counter()
            kept = times.setdefault(f"{tokens} tokens", {"load": [], "save": []})
            if round_:  # the first one compiles
                kept["load"].append(1e3 * (middle - begin))
                kept["save"].append(1e3 * (end - middle))
    return {
        tokens: {what: round(median(ms) * LAYERS / layers, 2) for what, ms in kinds.items()}
        for tokens, kinds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of the 30, for want of memory")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    copied = copies(args.layers, args.rounds)
    print(copied, flush=True)
    read = reads(args.layers, args.rounds)
    write(args.out, {**start, "layers_timed": args.layers, "attention_ms": read, "copy_ms": copied})


if __name__ == "__main__":
    main()
