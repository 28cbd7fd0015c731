"""Floors of every operation and of whole decoding cycles on an H100 and an H200: bytes and operations by hand against
the published ceilings, and what the compiled head really moves.

    python benchmarks/roofline.py --out benchmarks/results/roofline.json [--compile]

A floor is ``max(bytes / bandwidth, operations / peak)`` with every input read once, every result written once and
nothing kept between operations but what they hand on. ``--compile`` (needs the H100 compiler, extra ``aot``) adds the
bytes of the head as compiled: those of its kernels by hand, all else as the program says.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from published import RANK, TARGETS, drafter_config  # noqa: E402
from report import environment, write  # noqa: E402

from dspark_jax.config import DecoderConfig  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Device:
    """Published ceilings: bytes a second, dense bfloat16 operations a second."""

    bandwidth: float
    peak: float


DEVICES = {
    "h100-sxm": Device(3.352e12, 989.4e12),  # NVIDIA H100 data sheet
    "h200-sxm": Device(4.8e12, 989.4e12),  # NVIDIA H200 data sheet
}
BATCHES, BLOCKS = (1, 8, 64, 128), (7, 15)
CONTEXT = 2048  # cached tokens of a request
BF16, F32 = 2, 4
PAPER_HEAD_MS = 2.5  # what the paper's figure implies for batch 128 and draft length 16


@dataclasses.dataclass(frozen=True)
class Op:
    """Bytes moved and operations of one operation of a cycle."""

    name: str
    bytes: float
    flops: float

    def floor_us(self, device: Device) -> float:
        return 1e6 * max(self.bytes / device.bandwidth, self.flops / device.peak)


def product(name: str, tokens: int, wide: int, out: int, out_bytes: int = BF16) -> Op:
    """``[tokens, wide] x [wide, out]``, the weight read once."""
    return Op(name, BF16 * (wide * out + tokens * wide) + out_bytes * tokens * out, 2.0 * tokens * wide * out)


def total(name: str, ops: list[Op]) -> Op:
    """Several as one line; its floor is at most the sum of theirs."""
    return Op(name, sum(op.bytes for op in ops), sum(op.flops for op in ops))


def layer_products(config: DecoderConfig, tokens: int) -> list[Op]:
    d, ff, head = config.hidden_size, config.intermediate_size, config.layers[0].head_dim
    q, kv = config.num_heads * head, config.layers[0].num_kv_heads * head
    return [
        product("qkv", tokens, d, q + 2 * kv),
        product("o", tokens, q, d),
        product("gate, up", tokens, d, 2 * ff),
        product("down", tokens, ff, d),
    ]


def attention(config: DecoderConfig, batch: int, width: int, context: int) -> Op:
    """One layer: keys and values of the context once, queries in, results out."""
    layer = config.layers[0]
    cells = 2 * batch * context * layer.num_kv_heads * layer.head_dim * BF16
    ends = 2 * batch * width * config.num_heads * layer.head_dim * BF16
    return Op("attention", cells + ends, 4.0 * batch * width * context * config.num_heads * layer.head_dim)


def head(batch: int, block: int, vocab: int, rank: int = RANK) -> Op:
    """The sequential head: at each place W2 once and the place's base logits once, nothing of width V written."""
    place = BF16 * (vocab * rank + batch * vocab) + BF16 * 2 * batch * rank
    return Op("markov_sample", block * place, 2.0 * block * batch * vocab * rank)


def verification(batch: int, width: int, vocab: int) -> Op:
    """Target logits once in float32, as the unembedding writes them."""
    return Op("verify", F32 * batch * width * vocab, 10.0 * batch * width * vocab)


def cycle(config: DecoderConfig, batch: int, block: int) -> list[Op]:
    """Every operation of a cycle that drafts and verifies whole blocks, norms and rotations left out (they are fused
    into their neighbours)."""
    drafter = drafter_config(config, block)
    d, vocab, tokens = config.hidden_size, config.vocab_size, batch * (block + 1)
    kv = 2 * config.layers[0].num_kv_heads * config.layers[0].head_dim
    draft_layers = drafter.decoder.num_layers
    taps = len(drafter.target_layer_ids)
    rows = batch * block

    def layers(model: DecoderConfig, n: int) -> Op:
        return total("layers", [op for op in layer_products(model, n) for _ in range(model.num_layers)])

    def caches(model: DecoderConfig, width: int) -> Op:
        one = attention(model, batch, width, CONTEXT + width)
        return total("attention", [one] * model.num_layers)

    return [
        dataclasses.replace(layers(drafter.decoder, rows), name="draft layers"),
        dataclasses.replace(caches(drafter.decoder, block), name="draft attention"),
        product("draft unembed", rows, d, vocab),
        head(batch, block, vocab),
        dataclasses.replace(layers(config, tokens), name="target layers"),
        dataclasses.replace(caches(config, block + 1), name="target attention"),
        product("target unembed", tokens, d, vocab, F32),
        verification(batch, block + 1, vocab),
        total(
            "absorb",
            [product("fc", tokens, taps * d, d)] + [product("kv", tokens, d, kv)] * draft_layers,
        ),
    ]


def figures(name: str, batch: int, block: int) -> dict[str, Any]:
    ops = cycle(TARGETS[name], batch, block)
    row: dict[str, Any] = {"model": name, "batch": batch, "block": block}
    row["ops"] = {op.name: {"bytes": int(op.bytes), "flops": int(op.flops)} for op in ops}
    for device, ceilings in DEVICES.items():
        floors = {op.name: op.floor_us(ceilings) for op in ops}
        whole, sequential = sum(floors.values()), floors["markov_sample"]
        row[device] = {
            "floors_us": {key: round(value, 2) for key, value in floors.items()},
            "cycle_us": round(whole, 1),
            "head_us": round(sequential, 1),
            "head_share_at_the_roof": round(sequential / whole, 4),
            "head_share_at_40_percent_of_the_roof": round(0.4 * sequential / whole, 4),
        }
    return row


def compiled_head(batch: int, block: int, implementation: str) -> dict[str, Any]:
    """Bytes of the head at Qwen3-8B's shapes as compiled for an H100."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    from hlo import Program

    from pallas_kernels import deviceless
    from pallas_kernels.markov_sample import Block, Head, markov_sample

    config = TARGETS["qwen3-8b"]
    mesh = deviceless.h100_mesh()
    a, bf, u32, f32 = partial(deviceless.abstract, mesh), jnp.bfloat16, jnp.uint32, jnp.float32
    vocab, d = config.vocab_size, config.hidden_size
    tables = Head(
        a((vocab, RANK), bf), a((vocab, RANK), bf), confidence=a((1, d + RANK), bf), confidence_bias=a((1,), bf)
    )
    words = a((block, batch), u32)
    base, hidden = a((block, batch, vocab), bf), a((block, batch, d), bf)
    arguments = Block(base, hidden, a((batch,), jnp.int32), a((batch,), f32), words, words, None)
    run = jax.jit(partial(markov_sample, implementation=implementation, aot=True))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        exe = run.lower(tables, arguments).compile()
    tile = 128
    tiles = -(-vocab // tile)
    # A kernel reads W2, this place's base logits and the ids, and writes five numbers a tile and row.
    kernel = BF16 * vocab * (RANK + batch) + 4 * vocab + 5 * 4 * tiles * batch
    program = Program(exe.as_text())
    moved = program.moved({"mosaic_gpu": kernel} if implementation == "mosaic_gpu" else {})
    floor = head(batch, block, vocab).bytes
    return {
        "implementation": implementation,
        "batch": batch,
        "block": block,
        "bytes": sum(moved.values()),
        "floor_bytes": int(floor),
        "ratio": round(sum(moved.values()) / floor, 3),
        "launches": program.launches(),
        "temporaries": exe.memory_analysis().temp_size_in_bytes,
        "largest": sorted(((size, name) for name, size in moved.items()), reverse=True)[:4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    models = ("qwen3-4b", "qwen3-8b", "qwen3-14b")
    rows = [figures(name, batch, block) for name in models for batch in BATCHES for block in BLOCKS]
    heads = [compiled_head(b, g, "mosaic_gpu") for b, g in ((64, 7), (128, 15))] if args.compile else []
    write(
        args.out,
        {
            **start,
            "device": "none: arithmetic and compiled programs",
            "ceilings": {name: dataclasses.asdict(device) for name, device in DEVICES.items()},
            "context_tokens": CONTEXT,
            "paper_head_ms_at_batch_128_block_15": PAPER_HEAD_MS,
            "compiled_head_qwen3_8b": heads,
            "cycles": rows,
        },
    )


if __name__ == "__main__":
    main()
