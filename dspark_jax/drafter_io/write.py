"""Writing: a ``DrafterConfig`` as ``config.json`` in DeepSpec's or speculators' layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.drafter_io.backbone import backbone_to_hf
from dspark_jax.drafter_io.chains import NORM_KEYS
from dspark_jax.drafter_io.formats import slots_of_drafts


def _family(decoder: DecoderConfig) -> str:
    return decoder.family.split("_")[0].capitalize()  # gemma4_text, gemma4_unified_text: Gemma4


def drafter_config_to_hf(config: DrafterConfig) -> dict[str, Any]:
    """``config.json`` in DeepSpec's layout, with the keys its own classes and other engines read.

    Our extensions (``draft_vocab_size``, ``block_widths``, ``sample_from_anchor`` for the fill-in layout) are
    written only where they say something. ``num_anchors`` is a training setting that its class demands. MTP has no
    class there: the layout is ours (``"method": "mtp"``).
    """
    if config.chain:
        return _chain_to_hf(config)
    out = backbone_to_hf(config.decoder)
    family = _family(config.decoder)
    out.update(
        architectures=[f"{family}DSparkModel"],
        block_size=slots_of_drafts(config.block_size, config.sample_from_anchor),
        enable_confidence_head=config.confidence_head,
        markov_rank=config.markov_rank,
        mask_token_id=config.mask_token_id,
        num_anchors=512,
        num_target_layers=config.num_target_layers,
        target_layer_ids=list(config.target_layer_ids),
    )
    if config.markov_rank:
        out["markov_head_type"] = config.markov_head
    if config.confidence_head:
        out["confidence_head_with_markov"] = config.confidence_with_markov
    if config.trimmed:
        out["draft_vocab_size"] = config.draft_vocab_size
    if config.block_widths:
        out["block_widths"] = list(config.block_widths)
    if not config.sample_from_anchor:
        out["sample_from_anchor"] = False
    return out


def _chain_to_hf(config: DrafterConfig) -> dict[str, Any]:
    """``step_loss_decay`` is a training setting; the norm switches are an extension, named as in speculators."""
    kind = {"eagle3": "Eagle3", "mtp": "MTP"}[config.method]
    out = backbone_to_hf(config.decoder)
    out.update(
        architectures=[f"{_family(config.decoder)}{kind}Model"],
        draft_num_hidden_layers=1,
        num_target_layers=config.num_target_layers,
        target_layer_ids=list(config.target_layer_ids),
    )
    if config.method == "mtp":
        out["method"] = "mtp"
        if config.block_size > 1:
            out["ttt_length"] = config.block_size
    else:
        out.update(ttt_length=config.block_size, step_loss_decay=0.8)
    out |= {key: True for name, key in NORM_KEYS.items() if getattr(config.norms, name)}
    if config.trimmed:
        out["draft_vocab_size"] = config.draft_vocab_size
    return out


def _eagle3_to_speculators(config: DrafterConfig, common: dict[str, Any]) -> dict[str, Any]:
    if config.method != "eagle3" or len(config.target_layer_ids) != 3:
        raise ValueError(
            f"speculators' layout holds EAGLE-3 drafters of three feature layers, found {config.method} with"
            f" {len(config.target_layer_ids)}"
        )
    return {
        **common,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        **{key: getattr(config.norms, name) for name, key in NORM_KEYS.items()},
    }


def drafter_config_to_speculators(
    config: DrafterConfig, *, verifier: str | None = None, verifier_architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """``config.json`` in the layout of vllm-project/speculators.

    Layer ids become indices of the hidden states (+1), and the block layout is always written.
    ``block_widths`` and ``num_target_layers`` have no place there and are dropped.

    Raises ValueError for MTP and for EAGLE-3 of another number of feature layers, which have no place there either.
    """
    kind = config.method if config.chain else "dspark" if config.markov_rank or config.confidence_head else "dflash"
    slots = slots_of_drafts(config.block_size, config.sample_from_anchor)
    backbone = backbone_to_hf(config.decoder)
    backbone.pop("architectures", None)
    names = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel", "eagle3": "Eagle3DraftModel"}
    out: dict[str, Any] = {
        "architectures": [names.get(kind, "")],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size}],
            "verifier": {"architectures": list(verifier_architectures), "name_or_path": verifier},
        },
        "transformer_layer_config": backbone,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.decoder.hidden_size,
    }
    if config.chain:
        return _eagle3_to_speculators(config, out)
    out.update(
        block_size=slots,
        aux_hidden_state_layer_ids=[i + 1 for i in config.target_layer_ids],
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        sliding_window_non_causal=True,  # our blocks are bidirectional in every layer
    )
    if kind == "dspark":
        out.update(
            markov_rank=config.markov_rank,
            markov_head_type=config.markov_head,
            enable_confidence_head=config.confidence_head,
            confidence_head_with_markov=config.confidence_head and config.confidence_with_markov,
        )
    return out
