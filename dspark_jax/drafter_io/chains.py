"""Reading the configs of chains: EAGLE-3 in DeepSpec's and speculators' layouts, MTP in ours.

DeepSpec: ``ttt_length``, ``target_layer_ids``. speculators: ``eagle_aux_hidden_state_layer_ids`` (indices of the
hidden states, often null), ``norm_*`` switches, d2t. MTP: ``"method": "mtp"`` beside the keys of the one layer, with
``target_layer_ids`` naming the target's last decoder layer, and ``ttt_length`` where it was trained for several steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import DrafterConfig, Eagle3Norms
from dspark_jax.drafter_io.backbone import backbone_config, backbone_decoder
from dspark_jax.drafter_io.fields import Fields, declared_drafts, is_int, layer_ids_of
from dspark_jax.drafter_io.formats import chain_method, speculators_type
from dspark_jax.drafter_io.refusals import UnsupportedDrafterError

LOG = logging.getLogger("dspark_jax.load")

SPECULATORS_DRAFTS = 3
"""Drafts a block where a speculators config names no number: its trainer's default."""

NORM_KEYS = {
    "before_residual": "norm_before_residual",
    "before_fc": "norm_before_fc",
    "each_feature": "fc_norm",
    "output": "norm_output",
}
"""Fields of ``Eagle3Norms`` and the keys of speculators (and vLLM) that they are written under."""


def chain_config_from_hf(
    config: Mapping[str, Any], *, source: str, names: Collection[str], target_layers: int | None
) -> DrafterConfig:
    """The config of a chain (``chain_method``); arguments and errors as ``drafter_config_from_hf``."""
    method = chain_method(config) or ""
    fields = Fields(config, source)
    speculators = speculators_type(config) is not None
    drafts = _drafts(config, fields, method, speculators)
    layer_ids = _layer_ids(config, fields, method, speculators, target_layers)
    backbone = backbone_config(config, source)
    modules = config.get("num_nextn_predict_layers") or 1
    for count, what in ((backbone.get("num_hidden_layers"), "layers"), (modules, "modules")):
        if is_int(count) and count != 1:
            name = {"eagle3": "EAGLE-3", "mtp": "MTP"}[method]
            raise UnsupportedDrafterError(f"{source}: {name} drafters of {count} {what} are not supported yet")
    decoder = backbone_decoder(backbone, source)
    draft_vocab = fields.integer("draft_vocab_size", decoder.vocab_size, least=1)
    if draft_vocab > decoder.vocab_size:
        raise ValueError(f"{source}: draft_vocab_size {draft_vocab} exceeds vocab_size {decoder.vocab_size}")
    norms = _norms(fields, method, speculators)
    LOG.info(
        "%s: %s drafter, outputs of target layers %s, %d draft tokens a block by default%s",
        source,
        f"speculators-{method}" if speculators else method,
        list(layer_ids),
        drafts,
        "".join(f", {key}" for name, key in NORM_KEYS.items() if getattr(norms, name)),
    )
    return DrafterConfig(
        method=method,
        decoder=decoder,
        block_size=drafts,
        target_layer_ids=layer_ids,
        num_target_layers=fields.integer("num_target_layers", 0),
        draft_vocab_size=draft_vocab,
        trimmed=draft_vocab < decoder.vocab_size or "d2t" in names,
        confidence_with_markov=False,
        logit_softcap=decoder.logit_softcap,
        norms=norms,
    )


def _drafts(config: Mapping[str, Any], fields: Fields, method: str, speculators: bool) -> int:
    """Drafts a block where nobody says how many."""
    if method == "mtp":
        return fields.integer("ttt_length", 1, least=1)
    default = (declared_drafts(config) or SPECULATORS_DRAFTS) if speculators else None
    return fields.integer("ttt_length", default, least=1)


def _layer_ids(
    config: Mapping[str, Any], fields: Fields, method: str, speculators: bool, target_layers: int | None
) -> tuple[int, ...]:
    """The tapped layers. speculators and vLLM fill a null in from the target's number of layers."""
    if speculators and fields.get("target_layer_ids") is None:
        if target_layers is None:
            raise ValueError(
                f"{fields.source}: eagle_aux_hidden_state_layer_ids is null, and its default depends on the target's"
                " number of layers: name the target, or write the ids"
            )
        states = (2, target_layers // 2, target_layers - 3)
        fields = Fields({**config, "eagle_aux_hidden_state_layer_ids": list(states)}, fields.source)
    ids = layer_ids_of(fields)
    if method == "mtp" and len(ids) != 1:
        raise ValueError(f"{fields.source}: target_layer_ids of an MTP module names one layer, found {list(ids)}")
    return ids


def _norms(fields: Fields, method: str, speculators: bool) -> Eagle3Norms:
    """speculators' documented default of every switch is false, and DeepSpec knows none of them."""
    if method != "eagle3":
        return Eagle3Norms()
    if speculators and fields.get("norm_before_residual") is None:
        LOG.warning(
            "%s: no norm_before_residual: taken as false, speculators' default; vLLM takes true. If the accepted"
            " length stays near 1.0, write true there",
            fields.source,
        )
    try:
        return Eagle3Norms(**{name: fields.boolean(key, False) for name, key in NORM_KEYS.items()})
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(fields.source) else f"{fields.source}: {text}") from None
