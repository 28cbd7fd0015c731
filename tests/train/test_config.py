"""Training configurations: the shipped ones load, and what they leave out is the target's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_toml import load_toml
from dspark_jax.train.config import DataConfig, DrafterShape, TrainConfig, drafter_config, fitted

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
    plain = drafter_config(DrafterShape(1, (0,), 1, markov_rank=0, confidence_head=False), target)
    assert plain.method == "dflash" and not plain.trimmed and plain.draft_vocab_size == 24


def test_dspark_has_the_papers_markov_head_unless_it_is_set_to_none(tmp_path: Path) -> None:
    """Rank 256, and what a file leaves out stands in a run's config.json as what it means. Chains have none."""
    left_out = DrafterShape(1, (0,), 1)
    assert left_out.markov_rank == 256 and dataclasses.asdict(left_out)["markov_rank"] == 256
    assert DrafterShape(1, (0,), 1, markov_rank=0).markov_rank == 0
    assert DrafterShape(1, (0,), method="mtp", confidence_head=False).markov_rank == 0
    text = CONFIGS[0].with_name("smollm2_dspark.toml").read_text().replace("markov_rank = 64\n", "")
    (tmp_path / "run.toml").write_text(text)
    assert load_toml(tmp_path / "run.toml", TrainConfig).drafter.markov_rank == 256


def test_a_bigram_start_without_what_it_fits_is_refused() -> None:
    """It was passed over in silence."""
    for values in ({"draft_vocab": 0}, {"draft_vocab": 20, "markov_rank": 0}):
        with pytest.raises(ValueError, match="bigram_start fits a Markov head .*: set markov_rank and draft_vocab"):
            DrafterShape(1, (0,), 1, bigram_start=True, **values)
    assert DrafterShape(1, (0,), 1, bigram_start=True, draft_vocab=20).bigram_start


def _set(name: str, *overrides: str) -> TrainConfig:
    return fitted(load_toml(CONFIGS[0].with_name(f"smollm2_{name}.toml"), TrainConfig, overrides))


def test_block_size_and_layers_can_be_changed_alone() -> None:
    """The widest width is the whole block, none is wider; the copied layers end where they ended."""
    small, large = _set("dspark", "drafter.block_size=3"), _set("dspark", "drafter.block_size=15")
    assert small.data.widths == (3, 3, 3, 2, 3, 3, 3, 3, 3, 1) and small.drafter.block_widths == (1, 2, 3)
    assert large.data.widths == (15, 3, 5, 2, 15, 4, 3, 6, 5, 1) and large.data.heldout_widths == (15, 5, 3)
    assert large.drafter.block_widths == (1, 2, 3, 4, 5, 6, 15)
    assert _set("dspark", "drafter.layers=1").drafter.copy_layers == (29,)
    assert _set("dspark", "drafter.layers=3").drafter.copy_layers == (27, 28, 29)
    given = load_toml(CONFIGS[0].with_name("smollm2_dspark.toml"), TrainConfig)
    assert fitted(given) == given
    assert _set("eagle3", "drafter.block_size=3").data.widths == (3,)
    assert _set("mtp", "drafter.block_size=1").data.heldout_widths == (1,)
    with pytest.raises(ValueError, match=r"drafter\.layers = 31: the target has too few layers up to 29"):
        _set("dspark", "drafter.layers=31")


def test_a_chain_has_one_layer_and_no_heads_and_mtp_taps_the_last_layer() -> None:
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    target = DecoderConfig("llama", 24, 16, 32, 2, (layer,) * 5, tie_embeddings=True)
    eagle3 = drafter_config(DrafterShape(1, (0, 3), method="eagle3", confidence_head=False, draft_vocab=20), target)
    assert eagle3.chain and eagle3.block_size == 7 and eagle3.trimmed and eagle3.mask_token_id < 0
    mtp = drafter_config(DrafterShape(1, (4,), method="mtp", block_size=5, confidence_head=False), target)
    assert mtp.method == "mtp" and mtp.block_size == 5
    with pytest.raises(ValueError, match="confidence_head = True: set markov_rank = 0"):
        DrafterShape(1, (0,), method="eagle3")
    with pytest.raises(ValueError, match=r"last layer, \[4\], found \[3\]"):
        drafter_config(DrafterShape(1, (3,), method="mtp", confidence_head=False), target)
    with pytest.raises(ValueError, match="one layer, found 2"):
        drafter_config(DrafterShape(2, (0,), method="eagle3", confidence_head=False), target)
    with pytest.raises(ValueError, match="needs a mask_token_id"):
        drafter_config(DrafterShape(1, (0,)), target)


def test_layers_and_tokens_that_the_target_does_not_have_are_named() -> None:
    """All of them in one line. With an earlier drafter to start from no layer is copied."""
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    target = DecoderConfig("llama", 24, 16, 32, 2, (layer,) * 5, tie_embeddings=True)
    right = DrafterShape(1, (-1, 4), 23, copy_layers=(4,), draft_vocab=24, always=(23,))
    drafter_config(right, target)
    for taps in ((0, 5), (3, 1), (1, 1), (-2, 1), ()):
        with pytest.raises(ValueError, match=r"^drafter: target_layer_ids must rise from -1 .* to 4 or less, found \["):
            drafter_config(dataclasses.replace(right, target_layer_ids=taps), target)
    wrong = dataclasses.replace(right, copy_layers=(5,), draft_vocab=25, mask_token_id=24, always=(0, 99))
    with pytest.raises(ValueError) as caught:
        drafter_config(wrong, target)
    assert str(caught.value) == (
        "drafter: copy_layers must lie in 0..4, found [5]; draft_vocab = 25, but the target has 24 tokens; "
        "mask_token_id = 24 is beyond the target's 24 tokens; always = 99 is beyond the target's 24 tokens"
    )
    drafter_config(dataclasses.replace(right, copy_layers=(5,), start_from="x"), target)
