"""Hugging Face configs in and out, against transformers' own config classes (no torch needed)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.checkpoint.tokenizer import import_transformers
from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_io import FAMILIES, decoder_config_from_hf, decoder_config_to_hf
from tests.oracle import oracle_dir

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

CASES: dict[str, dict[str, Any]] = {
    "llama, all defaults": {},
    "llama, old keys": {"rope_theta": 5e5, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True},
    "llama 3.1, old keys": {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "max_position_embeddings": 131072,
        "eos_token_id": [128001, 128008],
    },
    "llama 3.1, transformers 5": {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3},
        "max_position_embeddings": 131072,
        "mlp_bias": True,
    },
    "llama, linear, oldest spelling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, tied, null ids": {"tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None},
    "qwen3, sparse": {"model_type": "qwen3", "num_key_value_heads": 2},
    "qwen3, full": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
        "tie_word_embeddings": True,
    },
    "qwen3, yarn": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, "attention_factor": 1.2},
        "max_position_embeddings": 131072,
    },
    "qwen3, windows from max_window_layers": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
    },
    "qwen3, windows from layer_types": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3, a window that is not used": {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 0,
    },
}


def read(**changes: Any) -> DecoderConfig:
    return decoder_config_from_hf({**BASE, **changes}, source="config.json")


def transformers_config(config: dict[str, Any]) -> Any:
    config = json.loads(json.dumps(config))  # transformers changes nested dicts in place
    return import_transformers().AutoConfig.for_model(**config)


def assert_agrees(ours: DecoderConfig, theirs: Any) -> None:
    """Field by field with a transformers config object."""
    assert ours.family == theirs.model_type
    assert ours.num_layers == theirs.num_hidden_layers and ours.num_heads == theirs.num_attention_heads
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "attention_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.num_layers
    rope = theirs.rope_parameters
    for layer, kind in zip(ours.layers, types, strict=True):
        assert (layer.head_dim, layer.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
        assert layer.window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.factor == rope.get("factor", 1.0)
        assert layer.rope.original_max_positions == rope.get("original_max_position_embeddings", 0)
        for key in ("low_freq_factor", "high_freq_factor", "attention_factor"):
            if key in rope:
                assert getattr(layer.rope, key) == rope[key]


@pytest.mark.parametrize("case", CASES)
def test_a_config_means_what_transformers_takes_it_to_mean(case: str) -> None:
    assert_agrees(read(**CASES[case]), transformers_config({**BASE, **CASES[case]}))


@pytest.mark.parametrize("case", CASES)
def test_writing_and_reading_again_gives_the_same_config(case: str) -> None:
    ours = read(**CASES[case])
    written = decoder_config_to_hf(ours)
    assert decoder_config_from_hf(json.loads(json.dumps(written)), source="again") == ours
    assert_agrees(ours, transformers_config(written))


def test_the_oracle_target_is_read() -> None:
    path = oracle_dir() / "targets" / "qwen3_tiny" / "config.json"
    config = decoder_config_from_hf(json.loads(path.read_text()), source=str(path))
    assert config.layers == (LayerConfig(2, 16, RopeConfig(theta=10000.0)),) * 6
    assert config.qk_norm and config.eos_token_ids == () and not config.tie_embeddings


def test_a_missing_tie_flag_is_untied_and_missing_ids_are_those_of_the_family() -> None:
    assert not read().tie_embeddings
    assert read().eos_token_ids == (2,) and read(model_type="qwen3", num_key_value_heads=4).eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation", "want"),
    [
        (None, (9,)),
        ({}, (9,)),
        ({"eos_token_id": None}, (9,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 9]}, (7, 9)),
    ],
)
def test_the_generation_config_decides_the_end_tokens(generation: Any, want: tuple[int, ...]) -> None:
    raw = {**BASE, "eos_token_id": 9}
    assert decoder_config_from_hf(raw, source="c", generation_config=generation).eos_token_ids == want


def test_the_text_part_of_a_container_is_used_with_what_only_the_container_states() -> None:
    text = {**BASE, "model_type": "qwen3", "num_key_value_heads": 2, "tie_word_embeddings": False}
    outer = {"model_type": "qwen3_vl", "eos_token_id": 5, "tie_word_embeddings": True, "text_config": text}
    config = decoder_config_from_hf(outer, source="c")
    assert config.family == "qwen3" and config.eos_token_ids == (5,) and not config.tie_embeddings


def test_yarn_added_by_hand_stretches_the_window() -> None:
    """Qwen's model cards say to add rope_scaling and leave max_position_embeddings alone."""
    config = read(
        model_type="qwen3",
        num_key_value_heads=4,
        max_position_embeddings=40960,
        rope_scaling={"rope_type": "yarn", **YARN},
    )
    assert config.max_positions == 131072
    assert read(**CASES["qwen3, yarn"]).max_positions == 131072


def test_dynamic_rope_is_plain_rope_inside_the_trained_window() -> None:
    config = read(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=4096)
    assert config.layers[0].rope == RopeConfig() and config.max_positions == 4096


def test_all_missing_keys_are_named_together_with_the_file() -> None:
    with pytest.raises(ValueError) as error:
        decoder_config_from_hf({"hidden_size": 64}, source="/models/x/config.json")
    assert str(error.value) == (
        "/models/x/config.json: this config cannot be used\n  missing keys: model_type, vocab_size, "
        "intermediate_size, num_hidden_layers, num_attention_heads"
    )
    with pytest.raises(ValueError, match="missing keys: rope llama3: low_freq_factor, rope llama3: high_freq_f"):
        read(rope_parameters={"rope_type": "llama3", "factor": 8.0})


def test_everything_unsupported_is_in_one_error() -> None:
    with pytest.raises(ValueError) as error:
        read(
            model_type="qwen3_moe",
            num_experts=8,
            hidden_size_per_layer_input=256,
            hidden_act="relu2",
            rope_scaling={"rope_type": "longrope", "factor": 2.0},
            quantization_config={"quant_method": "fp8"},
            head_dim=15,
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "config.json: this config cannot be used"
    assert [line.strip() for line in lines[1:]] == [
        f"unsupported model_type 'qwen3_moe'; supported: {', '.join(FAMILIES)}",
        "unsupported: mixture of experts (num_experts = 8)",
        "unsupported: per-layer embeddings (hidden_size_per_layer_input = 256)",
        "unsupported: quantised weights (quantization_config = fp8)",
        "unsupported rope type 'longrope'; supported: default, linear, llama3, yarn, dynamic, proportional",
        "head_dim must be even for rotary positions, found 15",
        "unsupported hidden_act 'relu2'; supported: silu, swish, gelu_pytorch_tanh",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be an integer >= 1, found '64'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, found 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer >= 1, found True"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is no multiple of num_key_value_heads = 3"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number > 0, found -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, found 'yes'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be an integer, a list of integers or null"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_theta": 0}, "rope_theta must be a number > 0, found 0"),
        ({"partial_rotary_factor": 0.5}, "unsupported: partial_rotary_factor = 0.5"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "unsupported layer_types sliding_attention"),
        (
            {
                "model_type": "qwen3",
                "num_key_value_heads": 4,
                "layer_types": ["sliding_attention"] * 4,
                "use_sliding_window": False,
            },
            "layer_types has sliding_attention, but use_sliding_window = False",
        ),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read(**changes)


def test_a_drafter_window_named_by_layer_types_alone_is_honoured() -> None:
    config = read(
        model_type="qwen3",
        num_key_value_heads=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
    )
    assert [layer.window for layer in config.layers] == [16, 0, 16, 0]


def test_what_has_no_spelling_is_refused() -> None:
    config = read()
    with pytest.raises(ValueError, match="no Hugging Face spelling for family 'other'"):
        decoder_config_to_hf(dataclasses.replace(config, family="other"))
    layers = (*config.layers[:3], dataclasses.replace(config.layers[3], num_kv_heads=1))
    with pytest.raises(ValueError, match="no spelling for layers that differ"):
        decoder_config_to_hf(dataclasses.replace(config, layers=layers))


def test_a_written_config_loads_from_disk_in_transformers(tmp_path: Path) -> None:
    config = read(**CASES["llama 3.1, old keys"])
    (tmp_path / "config.json").write_text(json.dumps(decoder_config_to_hf(config)))
    theirs = import_transformers().AutoConfig.from_pretrained(tmp_path)
    assert_agrees(config, theirs)
