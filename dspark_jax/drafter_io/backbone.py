"""The Hugging Face style config of a drafter's layers, wherever and however its file spells it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.config import DecoderConfig
from dspark_jax.config_io import decoder_config_from_hf, decoder_config_to_hf
from dspark_jax.config_io.families import FAMILIES, FULL, SLIDING
from dspark_jax.drafter_io.fields import BACKBONES, is_int
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError

WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def backbone_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The Hugging Face style config of the drafter's layers, a trained window spelled out layer by layer."""
    nested = next((config[name] for name in BACKBONES if config.get(name) is not None), None)
    backbone = dict(config if nested is None else nested)
    if "model_type" in config:  # speculators writes its own kind there, beside the one of the nested config
        backbone.setdefault("model_type", config["model_type"])
    for key in WINDOW_KEYS:
        if config.get(key) is not None:  # exporters add these beside the nested config
            backbone[key] = config[key]
    backbone["tie_word_embeddings"] = False  # a drafter's head is its own or its target's
    if str(backbone.get("model_type")).startswith("gemma4") and is_int(backbone.get("num_hidden_layers")):
        # Every layer of a Gemma 4 drafter is a full one; without the key, most of a target's would slide.
        backbone.setdefault("layer_types", ["full_attention"] * backbone["num_hidden_layers"])
    _window(backbone, dict(config.get("dflash_config") or {}), source)
    hidden = config.get("target_hidden_size")
    if hidden is not None and backbone.get("hidden_size") not in (None, hidden):
        raise UnsupportedDrafterError(
            f"{source}: drafters narrower or wider than their target are not supported yet"
            f" (hidden_size {backbone['hidden_size']}, target_hidden_size {hidden})"
        )
    return backbone


def backbone_decoder(backbone: Mapping[str, Any], source: str) -> DecoderConfig:
    """The layers that ``backbone_config`` found.

    Windows of a family whose own class has none (Llama) are an extension that only drafters have: read from, and
    written under, the keys of those that have them. Raises what ``decoder_config_from_hf`` raises.
    """
    family, types = FAMILIES.get(str(backbone.get("model_type"))), backbone.get("layer_types") or ()
    if family is None or family.has_windows or SLIDING not in types:
        return decoder_config_from_hf(backbone, source=source)
    decoder = decoder_config_from_hf({k: v for k, v in backbone.items() if k not in WINDOW_KEYS}, source=source)
    window = backbone["sliding_window"]
    if len(types) != decoder.num_layers or not set(types) <= {FULL, SLIDING} or window < 1:
        raise ValueError(
            f"{source}: layer_types must name {decoder.num_layers} layers as {FULL} or {SLIDING}, and sliding_window "
            f"be at least 1, found {list(types)} and {window}"
        )
    layers = (
        dataclasses.replace(layer, window=window if kind == SLIDING else 0)
        for layer, kind in zip(decoder.layers, types, strict=True)
    )
    return dataclasses.replace(decoder, layers=tuple(layers))


def backbone_to_hf(decoder: DecoderConfig) -> dict[str, Any]:
    """What ``backbone_config`` and ``backbone_decoder`` read. Raises ValueError for layers that it cannot express."""
    windows = {layer.window for layer in decoder.layers} - {0}
    if not windows or FAMILIES[decoder.family].has_windows:
        out = decoder_config_to_hf(decoder)
    elif len(windows) > 1:
        raise ValueError(f"family {decoder.family!r} has no spelling for layers that differ: {decoder.layers}")
    else:
        plain = tuple(dataclasses.replace(layer, window=0) for layer in decoder.layers)
        out = decoder_config_to_hf(dataclasses.replace(decoder, layers=plain))
        kinds = [SLIDING if layer.window else FULL for layer in decoder.layers]
        out.update(layer_types=kinds, use_sliding_window=True, sliding_window=max(windows))
    out["tie_word_embeddings"] = False
    return out


def _window(backbone: dict[str, Any], dflash: Mapping[str, Any], source: str) -> None:
    """Writes ``layer_types`` where a window is declared without them.

    transformers would then window only the layers from ``max_window_layers`` (28 by default) on: none of a
    drafter's five, and a window that was trained is silently ignored.
    """
    layers = backbone.get("num_hidden_layers")
    if not is_int(layers):
        return  # decoder_config_from_hf names what is missing
    if dflash.get("use_swa"):
        backbone["sliding_window"] = dflash.get("swa_window_size") or backbone.get("sliding_window")
        backbone["layer_types"] = ["sliding_attention"] * layers
        backbone["use_sliding_window"] = True
    elif backbone.get("layer_types") is None and backbone.get("use_sliding_window"):
        first = backbone.get("max_window_layers") or 0
        backbone["layer_types"] = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if "sliding_attention" in (backbone.get("layer_types") or ()):
        if not is_int(backbone.get("sliding_window")):
            raise ValueError(f"{source}: sliding layers without a sliding_window")
        backbone.setdefault("use_sliding_window", True)
