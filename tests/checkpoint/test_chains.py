"""Configs and checkpoints of chains: what is read, what is written, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_drafter, load_target
from dspark_jax.checkpoint.convert import convert_drafter
from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.checkpoint.drafter_files import check_target, read_drafter
from dspark_jax.checkpoint.speculators import write_speculators
from dspark_jax.config import DrafterConfig, Eagle3Norms
from dspark_jax.drafter_io import drafter_config_from_hf, drafter_config_to_hf, drafter_config_to_speculators
from dspark_jax.drafters import KINDS, Eagle3Drafter, drafter_specs
from dspark_jax.params import ParamSpec, is_spec
from tests.checkpoint.drafter_cases import (
    BACKBONE,
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    edit_tensors,
    same_array,
    same_tree,
    target_config,
    target_view,
)
from tests.checkpoint.drafter_cases import target as tiny_target
from tests.oracle import oracle_dir

LAYER = {**BACKBONE, "num_hidden_layers": 1}
DEEPSPEC: dict[str, Any] = {
    **LAYER,
    "architectures": ["Qwen3Eagle3Model"],
    "num_target_layers": TARGET_LAYERS,
    "target_layer_ids": [0, 1, 3],
    "ttt_length": 6,
}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}]},
    "transformer_layer_config": LAYER,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "norm_before_residual": True,
}
MTP: dict[str, Any] = {**LAYER, "method": "mtp", "num_target_layers": TARGET_LAYERS, "target_layer_ids": [4]}


def read(config: dict[str, Any], *names: str, **options: Any) -> DrafterConfig:
    return drafter_config_from_hf(config, source="somewhere/config.json", tensor_names=names, **options)


def weights(config: DrafterConfig, seed: int = 3) -> Any:
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> Any:
        return jnp.asarray(rng.standard_normal(spec.shape), jnp.float32)

    return jax.tree.map(draw, drafter_specs(config), is_leaf=is_spec)


def test_layer_ids_of_both_layouts_mean_the_same_layers() -> None:
    """speculators counts hidden states, whose first is the embedding output."""
    a, b = read(DEEPSPEC), read(SPECULATORS)
    assert a.method == b.method == "eagle3" and a.target_layer_ids == b.target_layer_ids == (0, 1, 3)
    assert a.block_size == b.block_size == 6
    assert (a.norms, b.norms) == (Eagle3Norms(), Eagle3Norms(before_residual=True))
    assert read({**SPECULATORS, "speculators_config": {}}).block_size == 3  # its trainer's default


def test_null_layer_ids_follow_from_the_target_and_are_never_guessed() -> None:
    null = {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": None}
    assert read(null, target_layers=36).target_layer_ids == (1, 17, 32)  # hidden states 2, 18, 33 of Qwen3-8B
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids is null.*name the target"):
        read(null)
    with pytest.raises(ValueError, match="strictly increasing"):
        read(null, target_layers=5)


def test_every_norm_switch_is_read_and_needs_its_tensors(tmp_path: Path) -> None:
    for key, field in (("norm_before_fc", "before_fc"), ("fc_norm", "each_feature"), ("norm_output", "output")):
        assert getattr(read({**SPECULATORS, key: True}).norms, field)
    with pytest.raises(ValueError, match="config.json: norm_before_fc and fc_norm exclude each other"):
        read({**SPECULATORS, "norm_before_fc": True, "fc_norm": True})
    with pytest.raises(ValueError, match="config.json: norm_output must be true or false, found 1"):
        read({**SPECULATORS, "norm_output": 1})
    config = read({**SPECULATORS, "fc_norm": True})
    write_speculators(tmp_path, config, weights(config), drafter_specs(config))
    edit_tensors(tmp_path, fc_norm__1__weight=None)
    with pytest.raises(ValueError, match=r"fc_norm\.1\.weight"):
        read_drafter(tmp_path, drafter_specs, target=target_view())


def test_a_missing_residual_switch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """speculators documents false, vLLM takes true: whoever reads the log can tell why acceptance is low."""
    with caplog.at_level(logging.WARNING, "dspark_jax.load"):
        config = read({key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"})
    assert not config.norms.before_residual and "vLLM takes true" in caplog.text


def test_what_a_chain_cannot_do_without_is_named() -> None:
    for missing in ("target_layer_ids", "vocab_size"):
        with pytest.raises(ValueError, match=missing):
            read({key: value for key, value in DEEPSPEC.items() if key != missing})
    with pytest.raises(ValueError, match="an MTP module names one layer, found"):
        read({**MTP, "target_layer_ids": [1, 4]})
    with pytest.raises(ValueError, match="draft_vocab_size 12 of 40 needs the tensor d2t"):
        read({**SPECULATORS, "draft_vocab_size": 12}, "fc.weight")


def test_only_mtp_reads_the_last_layer() -> None:
    """The reference's hidden states hold the normed state there; MTP is ours and norms it itself."""
    check_target(read(MTP), target_config(), "d")
    with pytest.raises(ValueError, match="the last decoder layer, which cannot be tapped"):
        check_target(read({**DEEPSPEC, "target_layer_ids": [0, 1, 4]}), target_config(), "d")


@pytest.mark.parametrize(
    "raw",
    [DEEPSPEC, {**DEEPSPEC, "norm_output": True}, MTP, {**MTP, "ttt_length": 5}],
    ids=["eagle3", "norms", "mtp", "mtp of five steps"],
)
def test_a_written_config_reads_back_as_itself(raw: dict[str, Any]) -> None:
    config = read(raw)
    assert config.block_size == raw.get("ttt_length", 1)
    written = drafter_config_to_hf(config)
    assert read(written) == config
    assert all(written[key] == value for key, value in raw.items() if key not in BACKBONE)
    if config.method == "eagle3":
        assert read(drafter_config_to_speculators(config), target_layers=None).norms == config.norms
    else:
        with pytest.raises(ValueError, match="speculators' layout holds EAGLE-3 drafters of three feature layers"):
            drafter_config_to_speculators(config)


def test_the_references_config_survives_reading_and_writing() -> None:
    raw = json.loads((oracle_dir() / "qwen3_eagle3" / "draft" / "config.json").read_text())
    written = drafter_config_to_hf(drafter_config_from_hf(raw, source="d"))
    training = {"initializer_range", "attention_dropout", "use_cache", "max_window_layers"}
    for key in raw.keys() - training - {"dtype", "transformers_version", "target_model_name_or_path"}:
        assert written[key] == raw[key], key


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
@pytest.mark.parametrize("trimmed", [False, True])
def test_an_eagle3_checkpoint_loads_equal_in_both_layouts(tmp_path: Path, layout: str, trimmed: bool) -> None:
    target = tiny_target()
    config = read({**DEEPSPEC, **({"draft_vocab_size": 12} if trimmed else {})})
    ids = np.sort(np.random.default_rng(0).permutation(VOCAB)[:12]).astype(np.int32) if trimmed else None
    head = np.random.default_rng(1).normal(size=(config.draft_vocab_size, HIDDEN)).astype(np.float32)
    parts = (config, weights(config), drafter_specs(config))
    write = write_deepspec if layout == "deepspec" else write_speculators
    write(tmp_path / "a", *parts, d2t=ids, head=head)
    drafter = load_drafter(tmp_path / "a", target)
    expected = KINDS["eagle3"].build(
        parts[1], config, embed=target.params["embed_tokens"], head=jnp.asarray(head), d2t=ids
    )
    assert isinstance(drafter, Eagle3Drafter) and not drafter.has_confidence
    assert same_tree(drafter.params, expected.params) and same_array(drafter.shared.head, head)
    assert ids is None or np.array_equal(drafter.d2t, ids)
    assert drafter.shared.embed is target.params["embed_tokens"]


def test_conversion_refuses_what_the_other_layout_cannot_hold(tmp_path: Path) -> None:
    config, mtp = read({**DEEPSPEC, "norm_output": True}), read(MTP)
    for name, c in (("eagle3", config), ("mtp", mtp)):
        write_deepspec(tmp_path / name, c, weights(c), drafter_specs(c))
    convert_drafter(tmp_path / "eagle3", tmp_path / "spec", drafter_specs, to="speculators")
    again = read_drafter(tmp_path / "spec", drafter_specs)
    assert again.config.norms == config.norms and same_tree(again.params, weights(config))
    for name, to, full, why in (
        ("eagle3", "deepspec", True, "DeepSpec's own EAGLE-3 fuses five target layers"),
        ("mtp", "deepspec", True, "DeepSpec has no class for an MTP module"),
        ("mtp", "speculators", False, "speculators' layout holds EAGLE-3"),
    ):
        with pytest.raises(ValueError, match=why):
            convert_drafter(tmp_path / name, tmp_path / "out", drafter_specs, to=to, full=full)


def test_a_chains_directory_is_no_target(tmp_path: Path) -> None:
    for name, raw in (("eagle3", DEEPSPEC), ("mtp", MTP), ("speculators", SPECULATORS)):
        config = read(raw)
        write = write_speculators if name == "speculators" else write_deepspec
        write(tmp_path / name, config, weights(config), drafter_specs(config))
        with pytest.raises(ValueError, match="this is a drafter.*use load_drafter"):
            load_target(tmp_path / name)
