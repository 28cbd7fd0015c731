"""Training configurations: the shipped ones load, and what they leave out is the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_toml import load_toml
from dspark_jax.train.config import DataConfig, DrafterShape, TrainConfig, drafter_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs" / "train").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads(path: Path) -> None:
    config = load_toml(path, TrainConfig, ["optim.total_steps=7", "run.keep=1"])
    assert config.optim.total_steps == 7 and config.run.keep == 1


def test_unknown_keys_and_unshareable_anchors_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown key optim.speed"):
        load_toml(CONFIGS[0], TrainConfig, ["optim.speed=9"])
    with pytest.raises(ValueError, match="cannot be shared among rounds = 3"):
        DataConfig(Path("a"), Path("b"), anchors=10, rounds=3)


def test_the_drafter_takes_its_shape_from_the_target() -> None:
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig(theta=1e5))
    target = DecoderConfig("llama", 24, 16, 32, 2, (layer,) * 5, rms_norm_eps=1e-5, tie_embeddings=True)
    shape = DrafterShape(2, (0, 3), 1, markov_rank=4, draft_vocab=20, block_widths=(1, 7))
    config = drafter_config(shape, target)
    assert config.decoder.layers == (layer, layer) and config.decoder.rms_norm_eps == 1e-5
    assert config.num_target_layers == 5 and config.target_layer_ids == (0, 3)
    assert config.method == "dspark" and config.trimmed and config.draft_vocab_size == 20
    plain = drafter_config(DrafterShape(1, (0,), 1, confidence_head=False), target)
    assert plain.method == "dflash" and not plain.trimmed and plain.draft_vocab_size == 24
