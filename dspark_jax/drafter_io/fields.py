"""The spellings: under which keys each fact about a drafter is found, and how a value is looked up.

One field of a drafter is written flat, with a ``dspark_`` prefix, in a nested ``dspark_config`` or
``dflash_config``, or beside the backbone in ``transformer_layer_config`` / ``text_config``. All of them are
read; contradictions are errors, never a matter of precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

NESTED = ("dspark_config", "dflash_config")
BACKBONES = ("transformer_layer_config", "text_config")


# Further keys seen beside the drafter's own in published nested configs and under ``dspark_``: training
# settings, copies of backbone settings, and the keys that refuse_unsupported and read._window judge.
_KNOWN_BESIDE = frozenset(
    """adaptive attention_sink_bias causal ce_loss_alpha confidence_head_alpha draft_arch draft_topk head_dim
    l1_loss_alpha layer_types loss_decay_gamma max_anchors num_anchors num_context_layers num_draft_layers
    num_hidden_layers projector_type rope_theta shift_label source_speculators_model_type swa_window_size
    target_hidden_size target_num_hidden_layers training_block_size use_aux_hidden_state use_swa""".split()
)


def _same(value: Any) -> Any:
    return value


def _from_hidden_states_index(ids: Any) -> Any:
    """speculators numbers the list of hidden states, whose element 0 is the embedding output."""
    return [i - 1 for i in ids] if isinstance(ids, list | tuple) and all(map(is_int, ids)) else ids


# field of the drafter -> {key in a file: conversion to DeepSpec's meaning}
_KEYS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "block_size": {"block_size": _same},
    "target_layer_ids": {
        "target_layer_ids": _same,
        "aux_hidden_state_layer_ids": _from_hidden_states_index,
        "eagle_aux_hidden_state_layer_ids": _from_hidden_states_index,
    },
    "mask_token_id": {"mask_token_id": _same, "noise_token_id": _same},
    "num_target_layers": {"num_target_layers": _same},
    "markov_rank": {"markov_rank": _same},
    "markov_head_type": {"markov_head_type": _same},
    "enable_confidence_head": {"enable_confidence_head": _same},
    "confidence_head_with_markov": {"confidence_head_with_markov": _same},
    "sample_from_anchor": {
        "sample_from_anchor": _same,
        "query_zero_predicts_next": _same,
        "bonus_anchor": lambda value: not value if isinstance(value, bool) else value,
    },
    "draft_vocab_size": {"draft_vocab_size": _same},
    "block_widths": {"block_widths": _same},
    "ttt_length": {"ttt_length": _same},
    "norm_before_residual": {"norm_before_residual": _same},
    "norm_before_fc": {"norm_before_fc": _same},
    "fc_norm": {"fc_norm": _same},
    "norm_output": {"norm_output": _same},
}


def is_int(value: Any) -> TypeGuard[int]:
    """An integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """Looks a drafter's field up under all its spellings, refuses contradictions, and lists what is there."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.scopes: list[tuple[str, Mapping[str, Any]]] = [("", config)]
        for name in NESTED + BACKBONES:
            nested = config.get(name)
            if nested is None:
                continue
            if not isinstance(nested, Mapping):
                raise ValueError(f"{source}: {name} must be an object, found {nested!r}")
            self.scopes.append((f"{name}.", nested))
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        known = _KNOWN_BESIDE.union(*_KEYS.values())
        unknown = []
        for prefix, scope in self.scopes:
            for key in scope:
                own = prefix[:-1] in NESTED
                if (own or key.startswith("dspark_")) and prefix + key not in NESTED:
                    if key.removeprefix("dspark_") not in known:
                        unknown.append(prefix + key)
        if unknown:
            raise ValueError(
                f"{self.source}: drafter settings of an unknown spelling: {', '.join(sorted(unknown))}"
                f" (known: {', '.join(sorted(set().union(*_KEYS.values())))})"
            )

    def get(self, field: str, default: Any = None) -> Any:
        """Value of ``field`` in DeepSpec's meaning; ``default`` where no spelling of it occurs."""
        found: dict[str, Any] = {}
        for prefix, scope in self.scopes:
            for key, convert in _KEYS[field].items():
                for spelling in (key, f"dspark_{key}"):
                    if scope.get(spelling) is not None:
                        found[prefix + spelling] = convert(scope[spelling])
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            listed = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            raise ValueError(f"{self.source}: contradicting values for {field}: {listed}")
        return values[0] if values else default

    def integer(self, field: str, default: int | None = None, least: int = 0) -> int:
        """An integer field; missing without a default is an error that lists the keys that were found."""
        value = self.get(field, default)
        if value is None:
            raise self.missing(field)
        if not is_int(value) or value < least:
            raise ValueError(f"{self.source}: {field} must be an integer >= {least}, found {value!r}")
        return int(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.source}: {field} must be true or false, found {value!r}")
        return value

    def integers(self, field: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        value = self.get(field, default)
        if value is None:
            raise self.missing(field)
        if not isinstance(value, list | tuple) or not all(map(is_int, value)):
            raise ValueError(f"{self.source}: {field} must be a list of integers, found {value!r}")
        return tuple(int(i) for i in value)

    def missing(self, field: str) -> ValueError:
        spellings = " or ".join(f"{key} (also as dspark_{key})" for key in _KEYS[field])
        found = [prefix + key for prefix, scope in self.scopes for key in sorted(scope)]
        return ValueError(
            f"{self.source}: no {field}; looked for {spellings} at the top level and in"
            f" {', '.join(NESTED + BACKBONES)}; found {', '.join(found) or 'an empty config'}"
        )


def layer_ids_of(fields: Fields) -> tuple[int, ...]:
    """Tapped target layers in DeepSpec's numbers."""
    ids = fields.integers("target_layer_ids")
    if not ids or ids[0] < -1 or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ValueError(
            f"{fields.source}: target_layer_ids must be strictly increasing decoder layers (-1 = embedding"
            f" output), found {list(ids)} in DeepSpec's numbers"
        )
    return ids


def declared_drafts(config: Mapping[str, Any]) -> int | None:
    """Drafts a block that a speculators config proposes, None where it names no number."""
    spec = config.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if is_int(tokens) else None
