"""The Hugging Face style config of a drafter's layers, wherever and however its file spells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.drafter_io.fields import BACKBONES, is_int
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError


def backbone_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The Hugging Face style config of the drafter's layers, a trained window spelled out layer by layer."""
    nested = next((config[name] for name in BACKBONES if config.get(name) is not None), None)
    backbone = dict(config if nested is None else nested)
    if "model_type" in config:  # speculators writes its own kind there, beside the one of the nested config
        backbone.setdefault("model_type", config["model_type"])
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
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
