"""Reading: any published drafter config becomes a ``DrafterConfig``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dspark_jax.config import DrafterConfig
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.drafter_io.fields import BACKBONES, Fields, is_int
from dspark_jax.drafter_io.formats import (
    DEFAULT_SAMPLE_FROM_ANCHOR,
    drafter_format,
    drafts_of_slots,
    speculators_type,
)
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError, refuse_unsupported

LOG = logging.getLogger("dspark_jax.load")

MARKOV_HEADS = ("vanilla", "gated", "rnn")


def drafter_config_from_hf(
    config: Mapping[str, Any], *, source: str, tensor_names: Iterable[str] = ()
) -> DrafterConfig:
    """The one normaliser of drafter configurations.

    Args:
        config: the parsed ``config.json``, in any of the spellings named above.
        source: the file's name, for errors and the log.
        tensor_names: names in the checkpoint, if known: heads and vocabulary map are then checked too.

    Returns:
        The DrafterConfig; ``block_size`` counts drafts, ``target_layer_ids`` are in DeepSpec's numbers.

    Raises:
        UnsupportedDrafterError: a ValueError for EAGLE-3, MTP, mixture-of-experts and others, by name.
        ValueError: a missing ``mask_token_id`` (never defaulted), block size or layer ids; contradicting or
            unknown spellings (the message lists what was found); a head declared without its tensors, or the
            reverse.

    The block layout chosen is logged at INFO by ``dspark_jax.load``.
    """
    names = {name.removesuffix(".int8").removesuffix(".scale") for name in tensor_names}
    refuse_unsupported(config, names, speculators_type(config), source)
    fields = Fields(config, source)
    kind = drafter_format(config)
    # Asked first: a config without them is not a drafter's, whatever else may be wrong with it.
    slots = fields.integer("block_size", least=1)
    layer_ids = _layer_ids(fields)
    mask = fields.integer("mask_token_id")
    decoder = decoder_config_from_hf(_backbone(config, fields, kind), source=source)
    if mask >= decoder.vocab_size:
        raise ValueError(f"{source}: mask_token_id {mask} is beyond the vocabulary of {decoder.vocab_size}")
    anchor = fields.boolean("sample_from_anchor", DEFAULT_SAMPLE_FROM_ANCHOR[kind])
    drafts = _log_layout(config, fields, kind, slots, anchor)
    rank, head, confidence, with_markov = _heads(fields, kind)
    draft_vocab = fields.integer("draft_vocab_size", decoder.vocab_size, least=1)
    if draft_vocab > decoder.vocab_size:
        raise ValueError(f"{source}: draft_vocab_size {draft_vocab} exceeds vocab_size {decoder.vocab_size}")
    method = "dspark" if kind == "speculators-dspark" or rank or confidence else "dflash"
    result = DrafterConfig(
        method=method,
        decoder=decoder,
        block_size=drafts,
        target_layer_ids=layer_ids,
        mask_token_id=mask,
        num_target_layers=fields.integer("num_target_layers", 0),
        markov_rank=rank,
        markov_head=head,
        confidence_head=confidence,
        confidence_with_markov=with_markov,
        draft_vocab_size=draft_vocab,
        trimmed=draft_vocab < decoder.vocab_size or "d2t" in names,
        sample_from_anchor=anchor,
        block_widths=_block_widths(fields, slots),
        logit_softcap=decoder.logit_softcap,
    )
    if names:
        _check_tensors(result, names, source)
    return result


def _layer_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.integers("target_layer_ids")
    if not ids or ids[0] < -1 or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ValueError(
            f"{fields.source}: target_layer_ids must be strictly increasing decoder layers (-1 = embedding"
            f" output), found {list(ids)} in DeepSpec's numbers"
        )
    return ids


def _block_widths(fields: Fields, slots: int) -> tuple[int, ...]:
    widths = tuple(sorted(set(fields.integers("block_widths", ()))))
    if widths and not 1 <= widths[0] <= widths[-1] <= slots:
        raise ValueError(f"{fields.source}: block_widths must lie in 1..{slots}, found {list(widths)}")
    return widths


def _heads(fields: Fields, kind: str) -> tuple[int, str, bool, bool]:
    """(markov_rank, markov_head_type, confidence head?, does it read W1?).

    The defaults of speculators are its documented ones; DeepSpec writes each key whenever its head exists.
    """
    dspark = kind == "speculators-dspark"
    rank = fields.integer("markov_rank", 256 if dspark else 0)
    head = fields.get("markov_head_type", "vanilla") if rank else "vanilla"
    if head not in MARKOV_HEADS:
        raise ValueError(f"{fields.source}: unknown markov_head_type {head!r}, known: {', '.join(MARKOV_HEADS)}")
    confidence = fields.boolean("enable_confidence_head", dspark)
    with_markov = fields.boolean("confidence_head_with_markov", rank > 0)
    if confidence and with_markov and rank == 0:
        raise ValueError(f"{fields.source}: confidence_head_with_markov needs a Markov head, found markov_rank 0")
    return rank, head, confidence, with_markov


def _log_layout(config: Mapping[str, Any], fields: Fields, kind: str, slots: int, anchor: bool) -> int:
    """Says which block layout was chosen; returns the drafts a block makes."""
    drafts = drafts_of_slots(slots, anchor)
    if drafts < 1:
        raise ValueError(f"{fields.source}: block_size {slots} leaves no draft token in the fill-in layout")
    read = fields.get("sample_from_anchor") is not None
    LOG.info(
        "%s: %s drafter, %s layout (sample_from_anchor=%s, %s), block_size %d = %d draft tokens",
        fields.source,
        kind,
        "anchor-first" if anchor else "fill-in",
        str(anchor).lower(),
        "as the file says" if read else f"the default of {kind}",
        slots,
        drafts,
    )
    declared = _declared_drafts(config)
    if declared is not None and declared != drafts:
        LOG.warning(
            "%s: speculators_config proposes %d tokens a block where this layout makes %d; if the accepted"
            " length stays near 1.0, its layout is the other one: set sample_from_anchor in its config",
            fields.source,
            declared,
            drafts,
        )
    return drafts


def _declared_drafts(config: Mapping[str, Any]) -> int | None:
    spec = config.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if is_int(tokens) else None


def _backbone(config: Mapping[str, Any], fields: Fields, kind: str) -> dict[str, Any]:
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
    _window(backbone, dict(config.get("dflash_config") or {}), fields.source)
    hidden = config.get("target_hidden_size")
    if hidden is not None and backbone.get("hidden_size") not in (None, hidden):
        raise UnsupportedDrafterError(
            f"{fields.source}: drafters narrower or wider than their target are not supported yet"
            f" (hidden_size {backbone['hidden_size']}, target_hidden_size {hidden})"
        )
    windowed = "sliding_attention" in (backbone.get("layer_types") or ())
    if windowed and kind.startswith("speculators") and not config.get("sliding_window_non_causal", False):
        raise UnsupportedDrafterError(
            f"{fields.source}: sliding layers that are causal inside the block (sliding_window_non_causal"
            " false) are not supported yet"
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


def head_tensors(config: DrafterConfig) -> tuple[str, ...]:
    """Names, in DeepSpec's layout, of the tensors of the heads that ``config`` declares."""
    names: list[str] = []
    if config.markov_rank:
        names += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
        extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head)
        names += [f"markov_head.{extra}.{part}" for part in ("weight", "bias")] if extra else []
    if config.confidence_head:
        names += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
    return tuple(names)


def _check_tensors(config: DrafterConfig, names: set[str], source: str) -> None:
    """Heads and vocabulary map: what is declared is there, and what is there is declared."""
    declared = set(head_tensors(config))
    missing = sorted(declared - names)
    undeclared = sorted(n for n in names - declared if n.startswith(("markov_head.", "confidence_head.")))
    problems = []
    if missing:
        problems.append(f"declared but not in the checkpoint: {', '.join(missing)}")
    if undeclared:
        problems.append(f"in the checkpoint but not declared: {', '.join(undeclared)}")
    if config.draft_vocab_size < config.decoder.vocab_size and "d2t" not in names:
        problems.append(
            f"draft_vocab_size {config.draft_vocab_size} of {config.decoder.vocab_size} needs the tensor d2t"
        )
    if "t2d" in names and "d2t" not in names:
        problems.append("t2d without d2t: the order of the draft vocabulary is unknown")
    if problems:
        raise ValueError(f"{source}: {'; '.join(problems)}")
