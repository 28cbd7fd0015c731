"""Reading: a Hugging Face ``config.json`` becomes a ``DecoderConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.config import DecoderConfig, RopeConfig
from dspark_jax.config_io.families import FAMILIES, Family, Json
from dspark_jax.config_io.layers import read_layers
from dspark_jax.config_io.reader import Reader

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_UNSUPPORTED = {  # a value that is set and not zero asks for arithmetic that is not there
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "enable_moe_block": "mixture of experts",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "keys and values shared between layers",
    "use_double_wide_mlp": "double-wide MLP",
    "quantization_config": "quantised weights",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def decoder_config_from_hf(config: Json, *, source: str, generation_config: Json | None = None) -> DecoderConfig:
    """Reads a Hugging Face ``config.json`` of a dense decoder of one of the ``FAMILIES``.

    Args:
        config: the parsed JSON; a nested ``text_config`` is used where there is one.
        source: the file, for errors.
        generation_config: the parsed ``generation_config.json``; its ``eos_token_id`` wins, as in
            transformers.

    Raises:
        ValueError: one message with all missing keys, wrong values and unsupported features.
    """
    text = _text_config(config)
    model_type = text.get("model_type")
    known = isinstance(model_type, str) and model_type in FAMILIES
    family = FAMILIES[str(model_type) if known else "llama"]
    reader = Reader(text, family.defaults)
    if model_type is None:
        reader.missing.append("model_type")
    elif not known:
        reader.problems.append(f"unsupported model_type {model_type!r}; supported: {', '.join(FAMILIES)}")
    _refuse(reader, family)
    size = {key: reader.required(key) for key in _REQUIRED}
    layers = read_layers(reader, family, size)
    act = reader.raw(family.activation_key, text.get("hidden_activation")) or "silu"
    if act not in _ACTIVATIONS:
        reader.problems.append(f"unsupported {family.activation_key} {act!r}; supported: {', '.join(_ACTIVATIONS)}")
    tokens = _token_ids(reader, generation_config or {})
    norm_eps = reader.number("rms_norm_eps", 1e-6)
    flags: dict[str, Any] = {
        "attention_bias": reader.flag("attention_bias"),
        "mlp_bias": reader.flag("mlp_bias") and family.has_mlp_bias,
        "tie_embeddings": reader.flag("tie_word_embeddings"),
    }
    softcap = reader.number("final_logit_softcapping", 0.0) if family.has_softcap else 0.0
    reader.fail(source)
    return DecoderConfig(
        family=str(model_type),
        vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_heads=size["num_attention_heads"],
        layers=layers,
        rms_norm_eps=norm_eps,
        activation=_ACTIVATIONS[act],
        embed_scale=size["hidden_size"] ** 0.5 if family.scaled_embedding else 1.0,
        logit_softcap=softcap,
        max_positions=_window(reader, layers[0].rope),
        **flags,
        **tokens,
        **family.fixed,
    )


def _refuse(reader: Reader, family: Family) -> None:
    for key, meaning in _UNSUPPORTED.items():
        value = reader.raw(key)
        if value and key not in family.harmless:
            default = "" if key in reader.config else ", the default of its model_type"
            reader.problems.append(f"unsupported: {meaning} ({key} = {_short(value)}{default})")


def _text_config(config: Json) -> Json:
    """The text part of a multimodal container, with what only the container may state."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    shared = ["model_type", "tie_word_embeddings", "quantization_config"]
    shared += ["eos_token_id", "bos_token_id", "pad_token_id"]
    outer = {key: config[key] for key in shared if key in config}
    if f"{outer.get('model_type')}_text" in FAMILIES:
        outer["model_type"] = f"{outer['model_type']}_text"
    return {**outer, **nested}


def _short(value: Any) -> str:
    return str(value.get("quant_method", "set")) if isinstance(value, Mapping) else repr(value)


def _token_ids(reader: Reader, generation: Json) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for key in ("bos_token_id", "pad_token_id"):
        value = reader.raw(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None and key in generation:
            value = generation[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            reader.problems.append(f"{key} must be an integer or null, found {value!r}")
        ids[key] = value
    eos = generation.get("eos_token_id")
    eos = reader.raw("eos_token_id") if eos is None else eos
    listed = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        reader.problems.append(f"eos_token_id must be an integer, a list of integers or null, found {eos!r}")
    ids["eos_token_ids"] = tuple(listed)
    return ids


def _window(reader: Reader, rope: RopeConfig) -> int:
    """The context window. A yarn config may still carry the trained window in max_position_embeddings (Qwen's
    model cards tell users to add rope_scaling only); the stretched one is what was asked for."""
    stated = reader.integer("max_position_embeddings", 2048)
    return max(stated, int(rope.original_max_positions * rope.factor)) if rope.kind == "yarn" else stated
