"""Writing: a ``DecoderConfig`` as a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.config import DecoderConfig
from dspark_jax.config_io.families import FAMILIES, FULL, SLIDING, Family
from dspark_jax.config_io.read import decoder_config_from_hf
from dspark_jax.config_io.rope import rope_to_hf

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}


def decoder_config_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a decoder, readable by transformers 4 and 5.

    Raises ValueError for a family without a row in ``FAMILIES`` and for layers that its keys cannot express.
    """
    family = FAMILIES.get(cfg.family)
    if family is None:
        raise ValueError(f"no Hugging Face spelling for family {cfg.family!r}; known: {', '.join(FAMILIES)}")
    eos = list(cfg.eos_token_ids)
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        family.activation_key: _ACTIVATIONS.get(cfg.activation, cfg.activation),
        "rms_norm_eps": cfg.rms_norm_eps,
        "attention_bias": cfg.attention_bias,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_positions,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": cfg.pad_token_id,
    }
    if family.has_mlp_bias:
        out["mlp_bias"] = cfg.mlp_bias
    if family.has_softcap:
        out["final_logit_softcapping"] = cfg.logit_softcap or None
    if not family.two_kinds:
        return {**out, **_one_kind(cfg, family)}
    out.update(_two_kinds(cfg, family))
    _require_spelling(cfg, out)
    return out


def _types(cfg: DecoderConfig) -> list[str]:
    return [SLIDING if layer.window else FULL for layer in cfg.layers]


def _one_kind(cfg: DecoderConfig, family: Family) -> dict[str, Any]:
    """Layers that differ in their window at most."""
    first = cfg.layers[0]
    windows = {layer.window for layer in cfg.layers} - {0}
    plain = {dataclasses.replace(layer, window=0) for layer in cfg.layers}
    if len(windows) > 1 or len(plain) > 1 or (windows and not family.has_windows):
        raise ValueError(f"family {cfg.family!r} has no spelling for layers that differ: {cfg.layers}")
    out: dict[str, Any] = {
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "rope_theta": first.rope.theta,
        "rope_parameters": rope_to_hf(first.rope),
    }
    if first.rope.kind != "default":  # transformers 4 reads rope_scaling
        out["rope_scaling"] = dict(out["rope_parameters"])
    if family.has_windows:
        out["layer_types"] = _types(cfg)
        out["use_sliding_window"] = bool(windows)
        out["sliding_window"] = max(windows, default=None)
        out["max_window_layers"] = next((i for i, x in enumerate(cfg.layers) if x.window), cfg.num_layers)
    return out


def _two_kinds(cfg: DecoderConfig, family: Family) -> dict[str, Any]:
    """Full and sliding layers, each with its own shape; what is absent here is written as absent."""
    full = next((layer for layer in cfg.layers if not layer.window), cfg.layers[-1])
    sliding = next((layer for layer in cfg.layers if layer.window), None)
    other = full if sliding is None else sliding
    ropes = {kind: dict(family.defaults["rope_parameters"][kind]) for kind in (FULL, SLIDING)}
    ropes[FULL] = rope_to_hf(full.rope)
    out: dict[str, Any] = {
        "layer_types": _types(cfg),
        "num_key_value_heads": other.num_kv_heads,
        "head_dim": other.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.k_eq_v,
        "rope_parameters": ropes,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }
    if sliding is not None:
        ropes[SLIDING] = rope_to_hf(sliding.rope)
        out["sliding_window"] = sliding.window
    return out


def _require_spelling(cfg: DecoderConfig, written: dict[str, Any]) -> None:
    """What the keys cannot say does not come back."""
    try:
        again = decoder_config_from_hf(written, source="config.json")
    except ValueError as error:
        raise ValueError(f"family {cfg.family!r} has no spelling for this decoder: {error}") from None
    names = [field.name for field in dataclasses.fields(cfg)]
    lost = [f"{name} = {getattr(cfg, name)}" for name in names if getattr(cfg, name) != getattr(again, name)]
    if lost:
        raise ValueError(f"family {cfg.family!r} has no spelling for {'; '.join(lost)}")
