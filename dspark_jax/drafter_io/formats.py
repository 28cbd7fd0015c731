"""Formats and block layouts: which one a config is of, and what its block size counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.drafter_io.fields import NESTED

BLOCK_KEYS = ("block_size", "dspark_block_size")

# Block layout where the file does not say: the documented default of each format.
DEFAULT_SAMPLE_FROM_ANCHOR = {
    "deepspec": True,
    "speculators-dspark": True,
    "speculators-dflash": False,
    "z-lab dflash": False,
}


def drafts_of_slots(slots: int, sample_from_anchor: bool) -> int:
    """Drafts of a block of ``slots`` positions: in the fill-in layout the anchor's slot predicts nothing."""
    return slots if sample_from_anchor else slots - 1


def slots_of_drafts(drafts: int, sample_from_anchor: bool) -> int:
    """Inverse of ``drafts_of_slots``: the number that checkpoints call ``block_size``."""
    return drafts if sample_from_anchor else drafts + 1


def drafter_format(config: Mapping[str, Any]) -> str:
    """Which format a config is of (a key of ``DEFAULT_SAMPLE_FROM_ANCHOR``), from the keys it holds.

    The architecture string alone decides nothing: DeepSpec's DFlash is a ``Qwen3DSparkModel``, and several
    exporters copy a name from elsewhere. It only breaks the tie for a config without a single DSpark key.
    """
    kind = speculators_type(config)
    if kind is not None:
        return f"speculators-{kind}"
    scopes = [config] + [config[name] for name in NESTED if isinstance(config.get(name), Mapping)]
    dspark = any(
        key in ("markov_rank", "enable_confidence_head", "dspark_config") or key.startswith("dspark_")
        for scope in scopes
        for key in scope
    ) or any(scope.get("projector_type") == "dspark" for scope in scopes)
    names = " ".join(map(str, config.get("architectures") or ()))
    z_lab = isinstance(config.get("dflash_config"), Mapping) or "DFlashDraftModel" in names
    return "z-lab dflash" if z_lab and not dspark else "deepspec"


def speculators_type(config: Mapping[str, Any]) -> str | None:
    """Algorithm of a config in the layout of vllm-project/speculators; None for other layouts."""
    kind = config.get("speculators_model_type")
    if kind is None and isinstance(config.get("speculators_config"), Mapping):
        kind = config["speculators_config"].get("algorithm")
    return None if kind is None else str(kind)


def chain_method(config: Mapping[str, Any]) -> str | None:
    """``eagle3`` or ``mtp`` for a chain in a layout that is read here; None for everything else.

    EAGLE-3 in DeepSpec's layout is known by its ``ttt_length`` (no block), in speculators' by its algorithm. MTP
    modules have a layout of ours, ``"method": "mtp"``.
    """
    kind = speculators_type(config)
    if kind is not None:
        return "eagle3" if kind == "eagle3" else None
    if config.get("method") == "mtp":
        return "mtp"
    blocks = any(key in config for key in BLOCK_KEYS)
    return "eagle3" if config.get("ttt_length") is not None and not blocks else None
