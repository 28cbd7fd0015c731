"""Rotary parameters: ``rope_parameters`` (transformers 5), or ``rope_theta`` + ``rope_scaling``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.config import RopeConfig
from dspark_jax.config_io.families import FULL, Json
from dspark_jax.config_io.reader import Reader

_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "proportional")
_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "dynamic": ("factor",),
}


def read_rope(reader: Reader) -> RopeConfig:
    """The one set of parameters of a decoder whose layers share it."""
    given = reader.raw("rope_scaling") or reader.raw("rope_parameters") or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"rope_parameters must be an object, found {given!r}")
        given = {}
    nested = given.get(FULL)
    if isinstance(nested, Mapping):  # keyed by layer type; Llama and Qwen3 use one set for all layers
        given = nested
    outer = {key: reader.raw(key) for key in ("rope_theta", "partial_rotary_factor")}
    return _rope({**_without_none(outer), **_without_none(given)}, reader)


def read_ropes(reader: Reader, kinds: Sequence[str]) -> dict[str, RopeConfig]:
    """A set for each of the layer types ``kinds``. Keys beside them say nothing: transformers fills in a stray
    ``rope_type`` and ``rope_theta`` there."""
    given = reader.raw("rope_parameters") or reader.defaults["rope_parameters"]
    ropes = {}
    for kind in kinds:
        own = given.get(kind) if isinstance(given, Mapping) else None
        if not isinstance(own, Mapping):
            reader.problems.append(f"rope_parameters must hold an object for {kind}, found {given!r}")
            own = {}
        ropes[kind] = _rope(_without_none(own), reader)
    return ropes


def _rope(given: Json, reader: Reader) -> RopeConfig:
    rope = Reader(given, {})
    rope.problems = reader.problems
    kind = rope.raw("rope_type", rope.raw("type", "default"))
    if kind not in _KINDS:
        rope.problems.append(f"unsupported rope type {kind!r}; supported: {', '.join(_KINDS)}")
        return RopeConfig()
    partial = rope.number("partial_rotary_factor", 1.0)
    if partial > 1.0 or (partial != 1.0 and kind != "proportional"):
        rope.problems.append(f"unsupported: partial_rotary_factor = {rope.raw('partial_rotary_factor')}")
    theta = rope.number("rope_theta", 10000.0)
    trained = rope.integer("original_max_position_embeddings", reader.raw("max_position_embeddings"))
    reader.missing += [f"rope {kind}: {key}" for key in _NEEDS.get(kind, ()) if rope.raw(key) is None]
    # "dynamic" changes nothing up to max_position_embeddings, and that is the window this decoder offers.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, rope.number("factor", 1.0))
    if kind == "proportional":
        return RopeConfig("proportional", theta, rope.number("factor", 1.0), partial_rotary_factor=partial)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
        return RopeConfig("llama3", theta, rope.number("factor", 1.0), low, high, trained)
    return _yarn(rope, reader, theta, trained)


def _yarn(rope: Reader, reader: Reader, theta: float, trained: int) -> RopeConfig:
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


def _without_none(given: Json) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


_KEYS: Mapping[str, Sequence[tuple[str, str]]] = {
    "default": (),
    "linear": (("factor", "factor"),),
    "proportional": (("factor", "factor"), ("partial_rotary_factor", "partial_rotary_factor")),
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


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """One set of ``rope_parameters``. Raises ValueError for a kind without a spelling."""
    if rope.kind not in _KEYS:
        raise ValueError(f"no Hugging Face spelling of rope kind {rope.kind!r}; known: {', '.join(_KEYS)}")
    values = {key: getattr(rope, field) for key, field in _KEYS[rope.kind]}
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **_without_none(values)}
