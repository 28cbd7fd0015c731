"""The same texts on one device, on a mesh, or on the mesh of several processes; written down as JSON.

    python -m tests.engine.mesh_run OUT.json --mesh 1x8 --local-devices 8
    python -m tests.engine.mesh_run OUT.json --mesh 2x4 --local-devices 4 \\
        --coordinator HOST:PORT --processes 2 --process 0
    python -m tests.engine.mesh_run OUT.json --mesh 1x8 --local-devices 8 --near-ties

``--mesh DxM``: D parts of the rows, M parts of the weights; 1x1 is one device. Everything is float64, where equality
holds without exception. ``--near-ties``: float32, on one device and on the mesh in one process, compared here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax

from tests import processes

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [7]]
NEW = 10


def models(mesh: Any, dtype: Any = "float64") -> tuple[Any, Any]:
    """A target of 8 key/value heads and its drafter, from the same numbers on every mesh."""
    from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
    from dspark_jax.drafters import Drafter, drafter_specs
    from dspark_jax.params import init
    from dspark_jax.sharding import place
    from dspark_jax.targets import Target
    from dspark_jax.targets.decoder import decoder_specs

    layer = LayerConfig(num_kv_heads=8, head_dim=4, rope=RopeConfig())
    config = DecoderConfig(
        family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=16, layers=(layer,) * 2,
        qk_norm=True, max_positions=64,
    )  # fmt: skip
    wanted = DrafterConfig(
        method="dspark", decoder=DecoderConfig(**{**vars(config), "layers": (layer,)}), block_size=3,
        target_layer_ids=(0, 1), mask_token_id=63, markov_rank=8, confidence_head=True,
    )  # fmt: skip
    params = init(decoder_specs(config), jax.random.key(0), dtype)
    params["embed_tokens"], params["lm_head"] = params["embed_tokens"] * 50, params["lm_head"] * 40
    drafting = init(drafter_specs(wanted), jax.random.key(1), dtype)
    if mesh is not None:
        params = place(params, decoder_specs(config), mesh)
        drafting = place(drafting, drafter_specs(wanted), mesh)
    target = Target.build(params, config, fuse=False)
    embed, head = params["embed_tokens"], params["lm_head"]
    return target, Drafter.build(drafting, wanted, embed=embed, head=head, fuse=False)


def texts(target: Any, drafter: Any) -> dict[str, Any]:
    """What ``generate`` emits under each rule."""
    import numpy as np

    from dspark_jax import Sampling, generate

    prompts = np.zeros((len(PROMPTS), 5), np.int32)
    for row, prompt in enumerate(PROMPTS):
        prompts[row, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in PROMPTS], np.int32)
    found = {}
    for rule in ("coupled", "rejection"):
        out = generate(
            target, drafter, prompts, lengths, seeds=np.arange(4, dtype=np.uint32), max_new_tokens=NEW,
            sampling=Sampling(0.8, top_p=0.95), verification=rule,
        )  # fmt: skip
        found[rule] = [np.asarray(out.tokens).tolist(), np.asarray(out.committed).tolist()]
    return found


def served(target: Any, drafter: Any, host: str) -> dict[str, Any] | None:
    """What an engine emits whose scheduler decides by step times; None on a process that only follows."""
    from dspark_jax import Engine, EngineConfig, Request, Sampling
    from dspark_jax.engine.multiprocess import connect
    from dspark_jax.schedule import StepTimeTable

    tokens = list(range(1, 33))
    times = StepTimeTable(tokens=tokens, milliseconds=[1 + 0.1 * t for t in tokens], draft_ms=0.1)
    config = EngineConfig(
        max_num_seqs=4, max_model_len=40, mode="lagged", prefill_buckets=(8,), slot_buckets=(4,), max_programs=1,
        step_time=times, profile_dir="", seed=0,
    )  # fmt: skip
    link = connect(host)
    engine = Engine(target, drafter, config, link=link)
    if link is not None and not link.leads:
        engine.follow()
        return None
    engine.warmup()
    requests = [
        Request(p, NEW, Sampling(0.0 if i == 0 else 0.8), seed=i, verification=("coupled", "rejection")[i % 2])
        for i, p in enumerate([*PROMPTS, [8, 8]])
    ]
    ids = [engine.submit(request) for request in requests]
    results = engine.run()
    assert engine.counters()["late_compiles"] == 0
    if link is not None:
        link.close()
    return {"served": [[results[i].tokens, results[i].committed, results[i].offered] for i in ids]}


def near_ties(mesh: Any) -> dict[str, int]:
    """float32 texts of a mesh against one device's, which differ at near ties only (AssertionError otherwise)."""
    import numpy as np

    from dspark_jax import Sampling, generate
    from tests.real_model.near_ties import Comparison

    seeds = np.arange(16, dtype=np.uint32)
    prompts = np.stack([[3 + i, 1 + i, 4] for i in range(len(seeds))]).astype(np.int32)
    alone, spread = models(None, "float32"), models(mesh, "float32")
    found = {"compared": 0, "excuses": 0}
    for temperature in (0.0, 0.8):
        comparison = Comparison(alone[0], temperature)
        a, b = (
            generate(
                target, drafter, prompts, np.full(len(seeds), 3, np.int32), seeds=seeds, max_new_tokens=48,
                sampling=Sampling(temperature), verification="coupled",
            ).tokens
            for target, drafter in (alone, spread)
        )  # fmt: skip
        for prompt, one, other, seed in zip(prompts, np.asarray(a), np.asarray(b), seeds, strict=True):
            comparison.texts(prompt.tolist(), one, other, int(seed))
        comparison.finish()
        found["compared"] += comparison.compared
        found["excuses"] += comparison.excuses
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--near-ties", action="store_true")
    processes.add_flags(parser)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", not args.near_ties)
    # Process 0 alone would find its programs there, and then wait for the other for longer than Gloo does.
    jax.config.update("jax_enable_compilation_cache", False)
    processes.join(args)
    data, model = map(int, args.mesh.split("x"))
    mesh = None
    if data * model > 1:
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=auto)
    if args.near_ties:
        args.out.write_text(json.dumps(near_ties(mesh)))
        return
    target, drafter = models(mesh)
    found = texts(target, drafter)
    engine = served(target, drafter, "127.0.0.1")
    if engine is not None:
        args.out.write_text(json.dumps(found | engine))


if __name__ == "__main__":
    main()
