"""Gemma 4 configs in and out, against transformers' own config classes (no torch needed)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dspark_jax.checkpoint.tokenizer import import_transformers
from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_io import decoder_config_from_hf, decoder_config_to_hf
from tests.oracle import oracle_dir

BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "hidden_size_per_layer_input": 0,
}
ROPES = {
    "sliding_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
}
CASES: dict[str, dict[str, Any]] = {
    "all defaults": {},
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_key_value_heads": 4},
    "values are keys, heads as elsewhere": {"attention_k_eq_v": True, "num_key_value_heads": 2},
    "global heads that do not count": {"num_global_key_value_heads": 2},
    "own ropes": {"rope_parameters": ROPES, "global_head_dim": 32, "head_dim": 16, "sliding_window": 6},
    "stray keys": {"rope_parameters": {**ROPES, "rope_theta": None, "rope_type": "default"}},
    "full layers only": {"layer_types": ["full_attention"] * 7, "final_logit_softcapping": 30.0},
    "untied": {"tie_word_embeddings": False, "attention_bias": True, "eos_token_id": [1, 106]},
    "newer spelling": {"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 2}, "6": {"head_dim": 64}}},
    "unified": {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
}


def read(**changes: Any) -> DecoderConfig:
    return decoder_config_from_hf({**BASE, **changes}, source="config.json")


def transformers_config(config: dict[str, Any]) -> Any:
    config = json.loads(json.dumps(config))  # transformers changes nested dicts in place
    if config["model_type"] == "gemma4_unified_text":
        config.pop("hidden_size_per_layer_input", None)
    try:
        return import_transformers().AutoConfig.for_model(**config)
    except AttributeError:
        # Some releases of transformers (5.17) cannot read the very keys that others (5.24) write.
        if config["rope_parameters"].keys() <= {"full_attention", "sliding_attention"}:
            raise
        pytest.skip("this release of transformers does not read these rope_parameters")


def assert_agrees(ours: DecoderConfig, theirs: Any) -> None:
    """Field by field with a transformers config object."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "attention_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.family, ours.num_heads) == (theirs.model_type, theirs.num_attention_heads)
    assert (ours.max_positions, ours.tie_embeddings) == (theirs.max_position_embeddings, theirs.tie_word_embeddings)
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))
    assert ours.logit_softcap == (theirs.final_logit_softcapping or 0.0)
    assert ours.num_layers == len(theirs.layer_types)
    for i, (layer, kind) in enumerate(zip(ours.layers, theirs.layer_types, strict=True)):
        own = theirs.per_layer_config[i]
        assert (layer.head_dim, layer.num_kv_heads) == (own.head_dim, own.num_key_value_heads), i
        assert layer.window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert layer.k_eq_v == (theirs.attention_k_eq_v and kind == "full_attention")
        rope = theirs.rope_parameters[kind]
        assert (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert layer.rope.factor == rope.get("factor", 1.0)
        assert layer.rope.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("case", CASES)
def test_a_config_means_what_transformers_takes_it_to_mean(case: str) -> None:
    assert_agrees(read(**CASES[case]), transformers_config({**BASE, **CASES[case]}))


@pytest.mark.parametrize("case", [case for case in CASES if case != "newer spelling"])
def test_writing_and_reading_again_gives_the_same_config(case: str) -> None:
    ours = read(**CASES[case])
    written = json.loads(json.dumps(decoder_config_to_hf(ours)))
    assert decoder_config_from_hf(written, source="again") == ours
    assert_agrees(ours, transformers_config(written))


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_writes_is_read_as_the_same_config(case: str) -> None:
    theirs = transformers_config({**BASE, **CASES[case]}).to_dict()
    assert decoder_config_from_hf(json.loads(json.dumps(theirs)), source="again") == read(**CASES[case])


def test_the_family_fixes_the_arithmetic() -> None:
    config = read()
    assert (config.embed_scale, config.attention_scale, config.activation) == (8.0, 1.0, "gelu_tanh")
    assert config.qk_norm and config.v_norm and config.sandwich_norm and config.layer_scalar and config.tie_embeddings
    assert [layer.window for layer in config.layers] == [512] * 5 + [0, 0]  # every sixth and the last are full


def test_the_oracle_target_is_read() -> None:
    path = oracle_dir() / "targets" / "gemma4_tiny" / "config.json"
    config = decoder_config_from_hf(json.loads(path.read_text()), source=str(path))
    sliding = LayerConfig(2, 16, RopeConfig(), 12)
    full = LayerConfig(1, 32, RopeConfig("proportional", 1e6, partial_rotary_factor=0.25), 0, True)
    assert config.layers == (sliding, sliding, full) * 2 and not config.uniform
    assert (config.logit_softcap, config.tie_embeddings, config.eos_token_ids) == (30.0, True, (1,))


def test_a_container_names_the_family_where_its_text_part_does_not() -> None:
    text = {key: value for key, value in BASE.items() if key != "model_type"}
    outer = {"model_type": "gemma4", "text_config": text, "vision_config": None}
    assert decoder_config_from_hf(outer, source="c") == read()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "per-layer embeddings": ({"hidden_size_per_layer_input": 256}, r"per-layer embeddings \(hidden_size_per_"),
    "shared layers": ({"num_kv_shared_layers": 2}, "keys and values shared between layers"),
    "experts": ({"enable_moe_block": True, "num_experts": 8}, r"mixture of experts \(enable_moe_block = True"),
    "wide": ({"use_double_wide_mlp": True}, r"double-wide MLP \(use_double_wide_mlp = True"),
    "both directions": ({"use_bidirectional_attention": "all"}, "attention in both directions"),
    "last layer slides": ({"layer_types": ["sliding_attention"] * 7}, "layer_types must end with full_attention"),
    "flat rope": ({"rope_parameters": {"rope_theta": 1e4}}, "must hold an object for sliding_attention"),
    "rope share": (
        {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
        "unsupported: partial_rotary_factor = 0.5",
    ),
    "rope share above one": (
        {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}},
        "unsupported: partial_rotary_factor = 2.0",
    ),
    "odd global heads": ({"global_head_dim": 15}, "head_dim must be even for rotary positions, found 15"),
    "global heads": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "num_attention_heads = 8 is no multiple of num_key_value_heads = 3",
    ),
    "other overrides": ({"per_layer_config": {"0": {"intermediate_size": 9}}}, r"per_layer_config\[0\]"),
    "override of no layer": ({"per_layer_config": {"7": {"head_dim": 16}}}, r"per_layer_config\[7\]"),
    "activation": ({"hidden_activation": "relu"}, "unsupported hidden_activation 'relu'"),
    "cap": ({"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a number > 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_per_layer_embeddings_are_on_unless_the_config_says_zero() -> None:
    raw = {key: value for key, value in BASE.items() if key != "hidden_size_per_layer_input"}
    with pytest.raises(ValueError, match="hidden_size_per_layer_input = 256, the default of its model_type"):
        decoder_config_from_hf(raw, source="c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_scale": 0.5}, "no spelling for attention_scale = 0.5"),
        ({"layers": read().layers[:5]}, "(?s)no spelling for this decoder: .*must end with full_attention"),
        ({"layers": (LayerConfig(2, 32, RopeConfig()), *read().layers[1:])}, "no spelling for layers = "),
    ],
)
def test_what_has_no_spelling_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_config_to_hf(dataclasses.replace(read(), **change))
