"""A training run small enough for tests, also as a process of its own: ``python -m tests.train.tiny_run FOLDER``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from tests import processes

VOCAB = 24


def target() -> Any:
    import jax

    from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
    from dspark_jax.targets import Target

    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    config = DecoderConfig("llama", VOCAB, 16, 32, 2, (layer, layer), tie_embeddings=True, max_positions=64)
    return Target.random(config, jax.random.key(0))


def records(folder: Path, count: int) -> Path:
    """Texts that count upwards, so that there is something to learn."""
    from dspark_jax.data.records import write_records

    if not (folder / "meta.json").is_file():
        texts = [[3 + (start + i) % (VOCAB - 4) for i in range(20)] for start in range(count)]
        write_records(folder, [(ids, [False] * 4 + [True] * 16) for ids in texts], vocab_size=VOCAB)
    return folder


def config(folder: Path, count: int = 40, **changes: Any) -> Any:
    """A TrainConfig whose data lie in ``folder``."""
    from dspark_jax.train.config import DataConfig, DrafterShape, OptimConfig, RunConfig, TrainConfig

    data = DataConfig(
        train=records(folder / "train", count),
        heldout=records(folder / "heldout", 4),
        length=20,
        batch=2,
        anchors=6,
        rounds=2,
        widths=(3, 1, 2),
        heldout_batches=1,
        heldout_anchors=4,
        heldout_widths=(3,),
    )
    shape = DrafterShape(
        layers=1,
        target_layer_ids=(0,),
        mask_token_id=1,
        block_size=3,
        block_widths=(1, 2, 3),
        copy_layers=(1,),
        markov_rank=4,
        bigram_start=True,
        draft_vocab=20,
        always=(0, 1),
    )
    optim = OptimConfig(learning_rate=1e-2, schedule="wsd", warmup_steps=2, total_steps=4, decay_steps=2)
    values = TrainConfig("tiny", data, shape, optim=optim, run=RunConfig(log_every=1, save_every_s=0.0))
    return dataclasses.replace(values, **changes)


def interrupt(run: Any, step: int, monkeypatch: Any) -> None:
    """Runs until ``step`` updates are done, and then as if somebody had pressed Ctrl-C."""
    import pytest

    next_batch = run._next_batch

    def dies() -> Any:
        if int(run.state.step) == step:
            raise KeyboardInterrupt
        return next_batch()

    monkeypatch.setattr(run, "_next_batch", dies)
    with pytest.raises(KeyboardInterrupt):
        run.run()


def chain(values: Any, method: str, **changes: Any) -> Any:
    """The same run of an EAGLE-3 or MTP drafter, its parameters averaged."""
    from dspark_jax.train.config import DrafterShape, LossConfig

    shape = DrafterShape(
        1, (0,) if method == "eagle3" else (1,), method=method, block_size=3, copy_layers=(1,), confidence_head=False,
        draft_vocab=20, always=(0, 1),
    )  # fmt: skip
    optim = dataclasses.replace(values.optim, ema_decay=0.5)
    loss = LossConfig((1.0, 0.0, 0.0), decay=4.4814, soft=True)
    return dataclasses.replace(values, drafter=shape, optim=optim, loss=loss, **changes)


def main() -> None:
    """Trains; several processes where ``--coordinator`` is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--method", default="dspark")
    processes.add_flags(parser)
    args = parser.parse_args()
    processes.join(args)
    from dspark_jax.train.loop import Run

    base = config(args.folder.parent, 100)
    base = base if args.method == "dspark" else chain(base, args.method)
    run = Run(
        dataclasses.replace(
            base,
            devices=0,
            data=dataclasses.replace(base.data, batch=args.batch),
            optim=dataclasses.replace(base.optim, total_steps=args.steps),
        ),
        target(),
        args.folder,
    )
    print("ready", flush=True)
    run.run()
    print("done", flush=True)


if __name__ == "__main__":
    sys.exit(main())
