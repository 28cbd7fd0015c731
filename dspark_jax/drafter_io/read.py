"""Reading: any published drafter config becomes a ``DrafterConfig``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dspark_jax.config import DrafterConfig
from dspark_jax.drafter_io.backbone import backbone_config, backbone_decoder
from dspark_jax.drafter_io.chains import chain_config_from_hf
from dspark_jax.drafter_io.fields import Fields, declared_drafts, layer_ids_of
from dspark_jax.drafter_io.formats import (
    DEFAULT_SAMPLE_FROM_ANCHOR,
    chain_method,
    drafter_format,
    drafts_of_slots,
    speculators_type,
)
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError, refuse_unsupported

LOG = logging.getLogger("dspark_jax.load")

MARKOV_HEADS = ("vanilla", "gated", "rnn")


def drafter_config_from_hf(
    config: Mapping[str, Any], *, source: str, tensor_names: Iterable[str] = (), target_layers: int | None = None
) -> DrafterConfig:
    """The one normaliser of drafter configurations.

    Args:
        config: the parsed ``config.json``, in any of the spellings named above.
        source: the file's name, for errors and the log.
        tensor_names: names in the checkpoint, if known: heads and vocabulary map are then checked too.
        target_layers: decoder layers of the target, if known: where an EAGLE-3 config leaves its layer ids out,
            they follow from it.

    Returns:
        The DrafterConfig; ``block_size`` counts drafts, ``target_layer_ids`` are in DeepSpec's numbers.

    Raises:
        UnsupportedDrafterError: a ValueError for mixture-of-experts and others, by name.
        ValueError: a missing ``mask_token_id`` (never defaulted), block size or layer ids; contradicting or
            unknown spellings (the message lists what was found); a head declared without its tensors, or the
            reverse.

    The block layout chosen is logged at INFO by ``dspark_jax.load``.
    """
    names = {name.removesuffix(".int8").removesuffix(".scale") for name in tensor_names}
    refuse_unsupported(config, names, speculators_type(config), source)
    if chain_method(config) is not None:
        result = chain_config_from_hf(config, source=source, names=names, target_layers=target_layers)
    else:
        result = _block_config(config, source, names)
    if names:
        _check_tensors(result, names, source)
    return result


def _block_config(config: Mapping[str, Any], source: str, names: set[str]) -> DrafterConfig:
    """The config of a block drafter."""
    fields = Fields(config, source)
    kind = drafter_format(config)
    # Asked first: a config without them is not a drafter's, whatever else may be wrong with it.
    slots = fields.integer("block_size", least=1)
    layer_ids = layer_ids_of(fields)
    mask = fields.integer("mask_token_id")
    backbone = backbone_config(config, source)
    _bidirectional(backbone, config, kind, source)
    decoder = backbone_decoder(backbone, source)
    if mask >= decoder.vocab_size:
        raise ValueError(f"{source}: mask_token_id {mask} is beyond the vocabulary of {decoder.vocab_size}")
    anchor = fields.boolean("sample_from_anchor", DEFAULT_SAMPLE_FROM_ANCHOR[kind])
    drafts = _log_layout(config, fields, kind, slots, anchor)
    rank, head, confidence, with_markov = _heads(fields, kind)
    draft_vocab = fields.integer("draft_vocab_size", decoder.vocab_size, least=1)
    if draft_vocab > decoder.vocab_size:
        raise ValueError(f"{source}: draft_vocab_size {draft_vocab} exceeds vocab_size {decoder.vocab_size}")
    method = "dspark" if kind == "speculators-dspark" or rank or confidence else "dflash"
    return DrafterConfig(
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
    declared = declared_drafts(config)
    if declared is not None and declared != drafts:
        LOG.warning(
            "%s: speculators_config proposes %d tokens a block where this layout makes %d; if the accepted"
            " length stays near 1.0, its layout is the other one: set sample_from_anchor in its config",
            fields.source,
            declared,
            drafts,
        )
    return drafts


def _bidirectional(backbone: Mapping[str, Any], config: Mapping[str, Any], kind: str, source: str) -> None:
    """Refuses windowed layers that speculators trained causal inside the block."""
    windowed = "sliding_attention" in (backbone.get("layer_types") or ())
    if windowed and kind.startswith("speculators") and not config.get("sliding_window_non_causal", False):
        raise UnsupportedDrafterError(
            f"{source}: sliding layers that are causal inside the block (sliding_window_non_causal"
            " false) are not supported yet"
        )


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
