"""A whole run on a tiny target: it learns, and an interrupted run ends exactly where an unbroken one does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.deepspec import read_deepspec
from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.data.records import write_records
from dspark_jax.drafters.dspark import drafter_specs
from dspark_jax.targets import Target
from dspark_jax.train.config import DataConfig, DrafterShape, OptimConfig, RunConfig, TrainConfig
from dspark_jax.train.loop import NonFiniteLoss, OutOfText, Run

VOCAB = 24


def _target() -> Target:
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    config = DecoderConfig("llama", VOCAB, 16, 32, 2, (layer, layer), tie_embeddings=True, max_positions=64)
    return Target.random(config, jax.random.key(0))


def _records(folder: Path, count: int) -> Path:
    """Texts that count upwards, so that there is something to learn."""
    texts = [[3 + (start + i) % (VOCAB - 4) for i in range(20)] for start in range(count)]
    write_records(folder, [(ids, [False] * 4 + [True] * 16) for ids in texts], vocab_size=VOCAB)
    return folder


def _config(tmp_path: Path, records: int = 40, **changes: Any) -> TrainConfig:
    data = DataConfig(
        train=_records(tmp_path / "train", records),
        heldout=_records(tmp_path / "heldout", 4),
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
    config = TrainConfig("tiny", data, shape, optim=optim, run=RunConfig(log_every=1, save_every_s=0.0))
    return dataclasses.replace(config, **changes)


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "total" in line]


def test_an_interrupted_run_equals_an_unbroken_one_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, moments, key, cursor and losses; the export reads back as the parameters."""
    target, config = _target(), _config(tmp_path)
    seldom = dataclasses.replace(config, run=dataclasses.replace(config.run, save_every_s=3600.0))
    whole = Run(seldom, target, tmp_path / "whole")
    whole.run()
    assert [line["step"] for line in _lines(tmp_path / "whole")] == [1, 2, 3, 4]

    broken = Run(config, target, tmp_path / "broken")
    next_batch = broken._next_batch

    def dies() -> Any:
        if int(broken.state.step) == 2:
            raise KeyboardInterrupt
        return next_batch()

    monkeypatch.setattr(broken, "_next_batch", dies)
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    resumed = Run(config, target, tmp_path / "broken")
    assert int(resumed.state.step) == 2 and int(resumed.state.cursor) == 4
    resumed.run()

    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    totals = [[line["total"] for line in _lines(tmp_path / name)] for name in ("whole", "broken")]
    assert totals[0] == totals[1]

    pieces = read_deepspec(resumed.export(tmp_path / "plain", quantize=False), drafter_specs)
    assert pieces.config == resumed.drafter and pieces.config.block_widths == (1, 2, 3)
    jax.tree.map(np.testing.assert_array_equal, pieces.params, resumed.state.params)
    assert resumed.d2t is not None
    np.testing.assert_array_equal(pieces.d2t, resumed.d2t)

    with pytest.raises(ValueError, match="drafter.markov_rank: 4 -> 8"):
        other = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, markov_rank=8))
        Run(other, target, tmp_path / "broken")


def test_the_loss_falls_until_the_text_is_used_up(tmp_path: Path) -> None:
    """60 steps need 120 records; with 100 the run stops after 50, its work saved and nothing repeated."""
    config = _config(tmp_path, 100)
    optim = dataclasses.replace(config.optim, total_steps=60)
    config = dataclasses.replace(config, optim=optim, run=RunConfig(log_every=5, save_every_s=3600.0))
    run = Run(config, _target(), tmp_path / "run")
    before = run.evaluate()["width_3"]["tau"]
    with pytest.raises(OutOfText, match="all 100 records"):
        run.run()
    totals = [line["total"] for line in _lines(tmp_path / "run")]
    assert totals[-1] < 0.9 * totals[0]
    assert run.evaluate()["width_3"]["tau"] > before
    assert (tmp_path / "run" / "checkpoints" / "50").is_dir()


def test_steps_without_a_finite_loss_are_skipped_and_a_row_of_them_stops_the_run(tmp_path: Path) -> None:
    config = _config(tmp_path, run=RunConfig(log_every=1, save_every_s=3600.0, max_skipped=4))
    target = _target()
    target = dataclasses.replace(target, params={**target.params, "norm": target.params["norm"].at[0].set(jnp.nan)})
    run = Run(config, target, tmp_path / "run")
    before = jax.tree.map(np.array, run.state.params)
    run.evaluate = lambda: {}  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="step 2: 4"):
        run.run()
    jax.tree.map(np.testing.assert_array_equal, run.state.params, before)
