"""Decoder configurations in and out of the Hugging Face spelling (``config.json``).

Everything that is wrong with a config is collected and raised as one ValueError that names the file. What a
family leaves out or fixes is a row of ``FAMILIES``; a new family (``gemma4``) is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one ``model_type`` spells a decoder.

    Attributes:
        architecture: the class name written to ``architectures``.
        defaults: what transformers assumes for keys that a config.json leaves out.
        fixed: fields of DecoderConfig that the family decides.
        has_mlp_bias: the ``mlp_bias`` key is honoured (elsewhere transformers ignores it).
        has_windows: sliding-window layers are honoured.
    """

    architecture: str
    defaults: Json
    fixed: Json
    has_mlp_bias: bool = False
    has_windows: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        fixed={},
        has_mlp_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        fixed={"qk_norm": True},
        has_windows=True,
    ),
    # "gemma4": sandwich norms, k_eq_v, layer scalars and two kinds of rope; the fields are in DecoderConfig.
}

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_UNSUPPORTED = {  # a value that is set and not zero asks for arithmetic that is not there
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "enable_moe_block": "mixture of experts",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "keys and values shared between layers",
    "quantization_config": "quantised weights",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "dynamic": ("factor",),
}


class _Reader:
    """Typed access to the keys of one config; collects what is missing or wrong instead of raising."""

    def __init__(self, config: Json, defaults: Json) -> None:
        self.config, self.defaults = config, defaults
        self.missing: list[str] = []
        self.problems: list[str] = []

    def raw(self, key: str, default: Any = None) -> Any:
        return self.config[key] if key in self.config else self.defaults.get(key, default)

    def integer(self, key: str, default: Any = None, minimum: int = 1) -> Any:
        value = self.raw(key, default)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.problems.append(f"{key} must be an integer >= {minimum}, found {value!r}")
            return default
        return value

    def required(self, key: str) -> int:
        if self.raw(key) is None:
            self.missing.append(key)
            return 1
        return self.integer(key, 1)

    def number(self, key: str, default: float) -> float:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.problems.append(f"{key} must be a number > 0, found {value!r}")
            return default
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} must be true or false, found {value!r}")
        return value is True

    def fail(self, source: str) -> None:
        """Raises the one error, if there is anything to say."""
        lines = [f"missing keys: {', '.join(self.missing)}"] if self.missing else []
        lines += self.problems
        if lines:
            raise ValueError("\n  ".join([f"{source}: this config cannot be used", *lines]))


def decoder_config_from_hf(config: Json, *, source: str, generation_config: Json | None = None) -> DecoderConfig:
    """Reads a Hugging Face ``config.json`` of a dense Llama or Qwen3 decoder.

    Args:
        config: the parsed JSON; a nested ``text_config`` is used where there is one.
        source: the file, for errors.
        generation_config: the parsed ``generation_config.json``; its ``eos_token_id`` wins, as in
            transformers.

    Raises:
        ValueError: one message with all missing keys, wrong values and unsupported features.
    """
    text = _text_config(config)
    model_type = text.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    reader = _Reader(text, (family or FAMILIES["llama"]).defaults)
    if model_type is None:
        reader.missing.append("model_type")
    elif family is None:
        reader.problems.append(f"unsupported model_type {model_type!r}; supported: {', '.join(FAMILIES)}")
    for key, meaning in _UNSUPPORTED.items():
        if text.get(key):
            reader.problems.append(f"unsupported: {meaning} ({key} = {_short(text[key])})")
    size = {key: reader.required(key) for key in _REQUIRED}
    layers = _layers(reader, family or FAMILIES["llama"], size)
    act = text.get("hidden_act", text.get("hidden_activation")) or "silu"
    if act not in _ACTIVATIONS:
        reader.problems.append(f"unsupported hidden_act {act!r}; supported: {', '.join(_ACTIVATIONS)}")
    tokens = _token_ids(reader, generation_config or {})
    norm_eps = reader.number("rms_norm_eps", 1e-6)
    flags: dict[str, Any] = {
        "attention_bias": reader.flag("attention_bias"),
        "mlp_bias": reader.flag("mlp_bias") and family is not None and family.has_mlp_bias,
        "tie_embeddings": reader.flag("tie_word_embeddings"),
    }
    reader.fail(source)
    return DecoderConfig(
        family=str(model_type),
        vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["intermediate_size"],
        num_heads=size["num_attention_heads"],
        layers=layers,
        rms_norm_eps=norm_eps,
        activation=_ACTIVATIONS[act],
        max_positions=_window(reader, layers[0].rope),
        **flags,
        **tokens,
        **(family.fixed if family else {}),
    )


def _text_config(config: Json) -> Json:
    """The text part of a multimodal container, with what only the container may state."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    shared = ["model_type", "tie_word_embeddings", "quantization_config"]
    shared += ["eos_token_id", "bos_token_id", "pad_token_id"]
    return {**{key: config[key] for key in shared if key in config}, **nested}


def _short(value: Any) -> str:
    return str(value.get("quant_method", "set")) if isinstance(value, Mapping) else repr(value)


def _token_ids(reader: _Reader, generation: Json) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for key in ("bos_token_id", "pad_token_id"):
        value = reader.raw(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None and key in generation:
            value = generation[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            reader.problems.append(f"{key} must be an integer or null, found {value!r}")
        ids[key] = value
    eos = generation.get("eos_token_id")
    eos = reader.raw("eos_token_id") if eos is None else eos
    listed = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        reader.problems.append(f"eos_token_id must be an integer, a list of integers or null, found {eos!r}")
    ids["eos_token_ids"] = tuple(listed)
    return ids


def _layers(reader: _Reader, family: Family, size: Mapping[str, int]) -> tuple[LayerConfig, ...]:
    heads, count = size["num_attention_heads"], size["num_hidden_layers"]
    kv_heads = reader.integer("num_key_value_heads") or heads
    head_dim = reader.integer("head_dim") or max(size["hidden_size"] // heads, 1)
    if heads % kv_heads:
        reader.problems.append(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    if head_dim % 2:
        reader.problems.append(f"head_dim must be even for rotary positions, found {head_dim}")
    rope = _rope(reader)
    layer = LayerConfig(kv_heads, head_dim, rope)
    return tuple(dataclasses.replace(layer, window=window) for window in _windows(reader, family, count))


def _windows(reader: _Reader, family: Family, count: int) -> list[int]:
    """The sliding window of each layer, 0 for full attention."""
    types = reader.raw("layer_types")
    use, window = reader.raw("use_sliding_window"), reader.raw("sliding_window")
    if types is None:
        if not (family.has_windows and use and window):
            return [0] * count
        first = reader.integer("max_window_layers", minimum=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    if not isinstance(types, (list, tuple)) or len(types) != count:
        reader.problems.append(f"layer_types must list {count} layers (num_hidden_layers), found {types!r}")
        return [0] * count
    known = ("full_attention", "sliding_attention") if family.has_windows else ("full_attention",)
    unknown = sorted({str(t) for t in types} - set(known))
    if unknown:
        reader.problems.append(f"unsupported layer_types {', '.join(unknown)}; supported: {', '.join(known)}")
    if "sliding_attention" in types and family.has_windows:
        # transformers drops the window when use_sliding_window is false and then fails in the mask.
        if use is False or not reader.integer("sliding_window"):
            reader.problems.append(
                f"layer_types has sliding_attention, but use_sliding_window = {use} and sliding_window = {window}"
            )
    return [reader.raw("sliding_window", 0) if t == "sliding_attention" else 0 for t in types]


def _rope(reader: _Reader) -> RopeConfig:
    """Rotary parameters from ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``."""
    given = reader.raw("rope_scaling") or reader.raw("rope_parameters") or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"rope_parameters must be an object, found {given!r}")
        given = {}
    nested = given.get("full_attention")
    if isinstance(nested, Mapping):  # keyed by layer type; Llama and Qwen3 use one set for all layers
        given = nested
    outer = {key: reader.raw(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = _Reader({**{k: v for k, v in outer.items() if v is not None}, **_without_none(given)}, {})
    rope.missing, rope.problems = [], reader.problems
    kind = rope.raw("rope_type", rope.raw("type", "default"))
    if kind not in _ROPE_KINDS:
        rope.problems.append(f"unsupported rope type {kind!r}; supported: {', '.join(_ROPE_KINDS)}")
        return RopeConfig()
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.problems.append(f"unsupported: partial_rotary_factor = {rope.raw('partial_rotary_factor')}")
    theta = rope.number("rope_theta", 10000.0)
    trained = rope.integer("original_max_position_embeddings", reader.raw("max_position_embeddings"))
    reader.missing += [f"rope {kind}: {key}" for key in _ROPE_NEEDS.get(kind, ()) if rope.raw(key) is None]
    # "dynamic" changes nothing up to max_position_embeddings, and that is the window this decoder offers.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, rope.number("factor", 1.0))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
        return RopeConfig("llama3", theta, rope.number("factor", 1.0), low, high, trained)
    return _yarn(rope, reader, theta, trained)


def _yarn(rope: _Reader, reader: _Reader, theta: float, trained: int) -> RopeConfig:
    factor = rope.number("factor", (reader.integer("max_position_embeddings", 1)) / max(trained, 1))
    optional: dict[str, Any] = {
        key: rope.number(key, 0.0) if rope.raw(key) is not None else None
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    }
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=trained,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.raw("truncate", True) is not False,
        **optional,
    )


def _without_none(given: Json) -> Json:
    return {key: value for key, value in given.items() if value is not None}


def _window(reader: _Reader, rope: RopeConfig) -> int:
    """The context window. A yarn config may still carry the trained window in max_position_embeddings (Qwen's
    model cards tell users to add rope_scaling only); the stretched one is what was asked for."""
    stated = reader.integer("max_position_embeddings", 2048)
    return max(stated, int(rope.original_max_positions * rope.factor)) if rope.kind == "yarn" else stated


def decoder_config_to_hf(cfg: DecoderConfig) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a decoder, readable by transformers 4 and 5.

    Raises ValueError for a family without a row in ``FAMILIES`` and for layers that its keys cannot express.
    """
    family = FAMILIES.get(cfg.family)
    if family is None:
        raise ValueError(f"no Hugging Face spelling for family {cfg.family!r}; known: {', '.join(FAMILIES)}")
    first = cfg.layers[0]
    windows = {layer.window for layer in cfg.layers} - {0}
    plain = {dataclasses.replace(layer, window=0) for layer in cfg.layers}
    if len(windows) > 1 or len(plain) > 1 or (windows and not family.has_windows):
        raise ValueError(f"family {cfg.family!r} has no spelling for layers that differ: {cfg.layers}")
    eos = list(cfg.eos_token_ids)
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "hidden_act": cfg.activation,
        "rms_norm_eps": cfg.rms_norm_eps,
        "attention_bias": cfg.attention_bias,
        "tie_word_embeddings": cfg.tie_embeddings,
        "max_position_embeddings": cfg.max_positions,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else eos,
        "pad_token_id": cfg.pad_token_id,
        "rope_theta": first.rope.theta,
        "rope_parameters": _rope_to_hf(first.rope),
    }
    if first.rope.kind != "default":  # transformers 4 reads rope_scaling
        out["rope_scaling"] = dict(out["rope_parameters"])
    if family.has_mlp_bias:
        out["mlp_bias"] = cfg.mlp_bias
    if family.has_windows:
        out["layer_types"] = ["sliding_attention" if x.window else "full_attention" for x in cfg.layers]
        out["use_sliding_window"] = bool(windows)
        out["sliding_window"] = max(windows, default=None)
        out["max_window_layers"] = next((i for i, x in enumerate(cfg.layers) if x.window), cfg.num_layers)
    return out


_ROPE_KEYS: Mapping[str, Sequence[tuple[str, str]]] = {
    "default": (),
    "linear": (("factor", "factor"),),
    "llama3": (
        ("factor", "factor"),
        ("low_freq_factor", "low_freq_factor"),
        ("high_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings", "original_max_positions"),
    ),
    "yarn": (
        ("factor", "factor"),
        ("original_max_position_embeddings", "original_max_positions"),
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
        ("attention_factor", "attention_factor"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale_all_dim"),
        ("truncate", "truncate"),
    ),
}


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind not in _ROPE_KEYS:
        raise ValueError(f"no Hugging Face spelling of rope kind {rope.kind!r}; known: {', '.join(_ROPE_KEYS)}")
    values = {key: getattr(rope, field) for key, field in _ROPE_KEYS[rope.kind]}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **_without_none(values)}
