"""The layers of a decoder: shapes, windows and rotary positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.config import LayerConfig
from dspark_jax.config_io.families import FULL, SLIDING, Family
from dspark_jax.config_io.reader import Reader
from dspark_jax.config_io.rope import read_rope, read_ropes

_OVERRIDES = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


def read_layers(reader: Reader, family: Family, size: Mapping[str, int]) -> tuple[LayerConfig, ...]:
    """One LayerConfig a layer; ``size`` holds the required integers."""
    heads = size["num_attention_heads"]
    kv_heads = reader.integer("num_key_value_heads") or heads
    head_dim = reader.integer("head_dim") or max(size["hidden_size"] // heads, 1)
    types = _layer_types(reader, family, size["num_hidden_layers"])
    if family.two_kinds:
        layers = _of_two_kinds(reader, types, kv_heads, head_dim)
    else:
        layer = LayerConfig(kv_heads, head_dim, read_rope(reader))
        layers = [dataclasses.replace(layer, window=window) for window in _windows(reader, types)]
    for kv_heads in dict.fromkeys(layer.num_kv_heads for layer in layers):
        if heads % kv_heads:
            reader.problems.append(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    for head_dim in dict.fromkeys(layer.head_dim for layer in layers):
        if head_dim % 2:
            reader.problems.append(f"head_dim must be even for rotary positions, found {head_dim}")
    return tuple(layers)


def _of_two_kinds(reader: Reader, types: Sequence[str], kv_heads: int, head_dim: int) -> list[LayerConfig]:
    """Full layers have ``global_head_dim`` and, where their values are their raw keys,
    ``num_global_key_value_heads``; newer transformers writes both as ``per_layer_config`` instead."""
    if reader.raw("use_bidirectional_attention") == "all":
        reader.problems.append("unsupported: attention in both directions (use_bidirectional_attention = 'all')")
    if types[-1] != FULL:
        reader.problems.append(f"layer_types must end with {FULL} (transformers would change it), found {types[-1]}")
    k_eq_v = reader.flag("attention_k_eq_v")
    ropes = read_ropes(reader, list(dict.fromkeys(types)))
    layers = [
        LayerConfig(kv_heads, head_dim, ropes[kind], window, k_eq_v and kind == FULL)
        for kind, window in zip(types, _windows(reader, types), strict=True)
    ]
    given = reader.raw("per_layer_config")
    if given is None:
        changes: dict[str, Any] = {"head_dim": reader.integer("global_head_dim") or head_dim}
        if k_eq_v:
            changes["num_kv_heads"] = reader.integer("num_global_key_value_heads") or kv_heads
        return [x if x.window else dataclasses.replace(x, **changes) for x in layers]
    return [dataclasses.replace(x, **own) for x, own in zip(layers, _overrides(reader, given, len(types)), strict=True)]


def _overrides(reader: Reader, given: Any, count: int) -> list[dict[str, Any]]:
    """Changed fields of each layer from ``per_layer_config``: {layer: {key: value}}."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    entries = given.items() if isinstance(given, Mapping) else [("?", given)]
    for index, own in entries:
        place = str(index).isdecimal() and int(index) < count
        if not (place and isinstance(own, Mapping) and own.keys() <= _OVERRIDES.keys()):
            reader.problems.append(f"unsupported per_layer_config[{index}] = {own!r}; known: {', '.join(_OVERRIDES)}")
            continue
        layer = Reader(own, {})
        layer.problems = reader.problems
        values = {field: layer.integer(key) for key, field in _OVERRIDES.items()}
        found[int(index)] = {field: value for field, value in values.items() if value is not None}
    return found


def _layer_types(reader: Reader, family: Family, count: int) -> list[str]:
    """The type of each layer; all full where what is given cannot be used."""
    types = reader.raw("layer_types")
    if types is None:
        return _default_types(reader, family, count)
    if not isinstance(types, (list, tuple)) or len(types) != count:
        reader.problems.append(f"layer_types must list {count} layers (num_hidden_layers), found {types!r}")
        return [FULL] * count
    known = (FULL, SLIDING) if family.has_windows else (FULL,)
    unknown = sorted({str(t) for t in types} - set(known))
    if unknown:
        reader.problems.append(f"unsupported layer_types {', '.join(unknown)}; supported: {', '.join(known)}")
        return [FULL] * count
    return list(types)


def _default_types(reader: Reader, family: Family, count: int) -> list[str]:
    if family.full_every:
        every = family.full_every
        return [FULL if (i + 1) % every == 0 or i + 1 == count else SLIDING for i in range(count)]
    if not (family.has_windows and reader.raw("use_sliding_window") and reader.raw("sliding_window")):
        return [FULL] * count
    first = reader.integer("max_window_layers", minimum=0)
    return [SLIDING if i >= first else FULL for i in range(count)]


def _windows(reader: Reader, types: Sequence[str]) -> list[int]:
    """The sliding window of each layer, 0 for full attention."""
    if SLIDING not in types:
        return [0] * len(types)
    use, window = reader.raw("use_sliding_window"), reader.integer("sliding_window")
    # transformers drops the window when use_sliding_window is false and then fails in the mask.
    if use is False or not window:
        reader.problems.append(
            f"layer_types has {SLIDING}, but use_sliding_window = {use} "
            f"and sliding_window = {reader.raw('sliding_window')}"
        )
    return [window or 0 if t == SLIDING else 0 for t in types]
