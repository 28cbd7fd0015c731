"""Drafters that are known and not supported yet, refused by name. Supporting one deletes its line here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from dspark_jax.drafter_io.formats import BLOCK_KEYS, chain_method

_GEMMA4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "dspark_n_routed_experts")


class UnsupportedDrafterError(ValueError):
    """A kind of drafter that this package knows by name but cannot run."""


class _Facts:
    """What the predicates below look at: keys, model types and names, wherever they stand in the config."""

    def __init__(self, config: Mapping[str, Any], names: Collection[str], algorithm: str | None) -> None:
        nested = [value for value in config.values() if isinstance(value, Mapping)]
        self.values: dict[str, list[Any]] = {}
        for scope in [config, *nested]:
            for key, value in scope.items():
                if value is not None:
                    self.values.setdefault(key, []).append(value)
        self.names = names
        self.algorithm = algorithm
        self.chain = chain_method(config)
        self.architectures = " ".join(map(str, config.get("architectures") or ())).lower()
        self.model_types = [str(value).lower() for value in self.values.get("model_type", ())]

    def has(self, *keys: str) -> bool:
        return any(key in self.values for key in keys)

    def true(self, *keys: str) -> bool:
        """Some of ``keys`` is set to something other than false, zero or nothing."""
        return any(bool(value) for key in keys for value in self.values.get(key, ()))

    def model_type(self, *parts: str) -> bool:
        return any(part in model_type for part in parts for model_type in self.model_types)

    def blocks(self) -> bool:
        """It has what every block drafter has: then an architecture's name alone makes it no other kind."""
        return self.has(*BLOCK_KEYS) and self.has("mask_token_id", "noise_token_id", "dspark_noise_token_id")


def _other_eagle3(f: _Facts) -> bool:
    by_name = ("eagle" in f.architectures or f.model_type("eagle")) and not f.blocks()
    by_keys = f.has("eagle_aux_hidden_state_layer_ids", "eagle_config") and not f.has(*BLOCK_KEYS)
    return f.algorithm is None and f.chain is None and (by_name or by_keys)


def _other_mtp(f: _Facts) -> bool:
    by_keys = (f.true("num_nextn_predict_layers") or "mtp" in f.architectures) and not f.has(*BLOCK_KEYS)
    named = f.algorithm in ("mtp", "fast_mtp", "fastmtp") or f.model_type("mtp")
    return f.chain is None and (named or by_keys)


def _dflash2(f: _Facts) -> bool:
    return f.algorithm == "dflash2" or f.has("selector_rank", "selector_top_k", "dflash2_candidate_selector")


def _domino(f: _Facts) -> bool:
    return "domino" in f.values.get("projector_type", ()) or f.has("domino_config")


def _other_algorithm(f: _Facts) -> bool:
    return f.algorithm is not None and f.algorithm not in ("dspark", "dflash", "eagle3")


def _gemma4(f: _Facts) -> bool:
    return any(model_type in _GEMMA4 for model_type in f.model_types)


def _gemma4_sliding(f: _Facts) -> bool:
    """The reference runs every layer of a Gemma 4 drafter as a full one, whatever its ``layer_types`` say."""
    return _gemma4(f) and any("sliding_attention" in types for types in f.values.get("layer_types", ()))


def _experts(f: _Facts) -> bool:
    """A dense Gemma 4 drafter copies the numbers of its target's experts; ``enable_moe_block`` decides."""
    if _gemma4(f):
        return f.true("enable_moe_block")
    return f.true(*_EXPERT_KEYS) or f.model_type("moe")


def _mask_row(f: _Facts) -> bool:
    return any("mask_embedding" in name for name in f.names)


# (name in the message, does it apply?), most specific first.
_REFUSED: tuple[tuple[str, Callable[[_Facts], bool]], ...] = (
    ("EAGLE-1 and EAGLE-2 drafters", lambda f: f.algorithm == "eagle"),
    ("EAGLE-3 drafters in another layout than DeepSpec's or speculators'", _other_eagle3),
    ("MTP drafters in another layout than ours (MTP layers of a target, speculators')", _other_mtp),
    ("DFlash2 drafters", _dflash2),
    ("Domino drafters", _domino),
    ("drafters of speculators_model_type {algorithm!r}", _other_algorithm),
    ("drafters inside a DeepSeek-V4 checkpoint", lambda f: f.model_type("deepseek")),
    ("Gemma drafters other than gemma4_text", lambda f: f.model_type("gemma") and not _gemma4(f)),
    ("Gemma drafters with sliding layers", _gemma4_sliding),
    ("mixture-of-experts drafters", _experts),
    ("drafters with causal blocks (causal true)", lambda f: f.true("causal")),
    ("drafters with attention sinks (attention_sink_bias true)", lambda f: f.true("attention_sink_bias")),
    ("drafters with gated attention (attn_output_gate true)", lambda f: f.true("attn_output_gate")),
    ("drafters with top-k context selection (topk_context)", lambda f: f.true("topk_context")),
    ("drafters quantised by other tools (quantization_config)", lambda f: f.true("quantization_config")),
    ("drafters with an embedding of their own for the mask (mask_embedding)", _mask_row),
)


def refuse_unsupported(config: Mapping[str, Any], names: Collection[str], algorithm: str | None, source: str) -> None:
    """Raises UnsupportedDrafterError, naming the kind, for drafters that cannot be run yet.

    Args:
        config: the parsed config, before any normalisation.
        names: tensor names of the checkpoint, empty where unknown.
        algorithm: ``speculators_model_type``, None outside that layout.
        source: the file's name.
    """
    facts = _Facts(config, names, algorithm)
    for kind, applies in _REFUSED:
        if applies(facts):
            name = kind.format(algorithm=algorithm)
            raise UnsupportedDrafterError(f"{source}: {name} are not supported yet")
