"""One transformer layer, and the abstract tree of its parameters, for targets and drafter backbones alike.

The caller brings the attention (over a cache, over context and block, over packed training blocks) as a function;
family differences are fields of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig, LayerConfig
from dspark_jax.nn.linear import join_rows, linear
from dspark_jax.nn.mlp import gated_mlp
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import apply_rope
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree

Aux = TypeVar("Aux")


def layer_specs(config: DecoderConfig, layer: LayerConfig, prefix: str, attention_inputs: int = 0) -> PyTree:
    """Parameters of one layer; ``prefix`` is e.g. ``model.layers.3.``. ``attention_inputs``: width of what the
    attention reads, where that is not the residual stream (0: d)."""
    d, ff = config.hidden_size, config.intermediate_size
    inner = attention_inputs or d
    q_out, kv_out = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def matrix(name: str, out: int, width: int, axes: tuple[str | None, str | None]) -> ParamSpec:
        scale = 1.0 / math.sqrt(width)
        return ParamSpec((out, width), axes, f"{prefix}{name}.weight", scale=scale)

    def bias(name: str, out: int, axis: str | None) -> ParamSpec:
        return ParamSpec((out,), (axis,), f"{prefix}{name}.bias", init="zeros")

    def norm(name: str, size: int = d) -> ParamSpec:
        return ParamSpec((size,), (None,), f"{prefix}{name}.weight", init="ones")

    attn = {
        "q_proj": matrix("self_attn.q_proj", q_out, inner, ("heads", "embed")),
        "k_proj": matrix("self_attn.k_proj", kv_out, inner, ("kv_heads", "embed")),
        "o_proj": matrix("self_attn.o_proj", d, q_out, ("embed", "heads")),
    }
    if not layer.k_eq_v:
        attn["v_proj"] = matrix("self_attn.v_proj", kv_out, inner, ("kv_heads", "embed"))
    if config.attention_bias:
        for name, out, axis in (("q", q_out, "heads"), ("k", kv_out, "kv_heads"), ("v", kv_out, "kv_heads")):
            if f"{name}_proj" in attn:
                attn[f"{name}_bias"] = bias(f"self_attn.{name}_proj", out, axis)
        attn["o_bias"] = bias("self_attn.o_proj", d, None)
    if config.qk_norm:
        attn["q_norm"] = norm("self_attn.q_norm", layer.head_dim)
        attn["k_norm"] = norm("self_attn.k_norm", layer.head_dim)
    mlp = {
        "gate_proj": matrix("mlp.gate_proj", ff, d, ("mlp", "embed")),
        "up_proj": matrix("mlp.up_proj", ff, d, ("mlp", "embed")),
        "down_proj": matrix("mlp.down_proj", d, ff, ("embed", "mlp")),
    }
    if config.mlp_bias:
        mlp |= {
            "gate_bias": bias("mlp.gate_proj", ff, "mlp"),
            "up_bias": bias("mlp.up_proj", ff, "mlp"),
            "down_bias": bias("mlp.down_proj", d, None),
        }
    specs = {
        "input_layernorm": norm("input_layernorm"),
        "attn": attn,
        "post_attention_layernorm": norm("post_attention_layernorm"),
        "mlp": mlp,
    }
    if config.sandwich_norm:
        specs["pre_feedforward_layernorm"] = norm("pre_feedforward_layernorm")
        specs["post_feedforward_layernorm"] = norm("post_feedforward_layernorm")
    if config.layer_scalar:
        specs["layer_scalar"] = ParamSpec((1,), (None,), f"{prefix}layer_scalar", init="ones")
    return specs


def fuse_projections(layer: PyTree) -> PyTree:
    """One layer's parameters with q, k, v and gate, up as one matrix each, for decoding on one device.

    Fewer and larger products; and on CPU the form of ``nn/linear.py`` for few tokens needs it, because XLA would
    share (and write out) the broadcast of an input that several products read.
    """
    if "qkv_proj" in layer["attn"]:
        return layer
    attn, mlp = dict(layer["attn"]), dict(layer["mlp"])
    parts = ("q", "k", "v") if "v_proj" in attn else ("q", "k")
    attn["qkv_proj"] = join_rows([attn.pop(f"{p}_proj") for p in parts])
    if "q_bias" in attn:
        attn["qkv_bias"] = jnp.concatenate([attn.pop(f"{p}_bias") for p in parts])
    mlp["gate_up_proj"] = join_rows([mlp.pop("gate_proj"), mlp.pop("up_proj")])
    if "gate_bias" in mlp:
        mlp["gate_up_bias"] = jnp.concatenate([mlp.pop("gate_bias"), mlp.pop("up_bias")])
    return {**layer, "attn": attn, "mlp": mlp}


def split_projections(config: DecoderConfig, layer: LayerConfig, params: PyTree) -> PyTree:
    """The inverse of ``fuse_projections``; parameters that are not fused are returned as they are."""
    attn, mlp = dict(params["attn"]), dict(params["mlp"])
    q, kv = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    names = ("q", "k") if layer.k_eq_v else ("q", "k", "v")
    ends = [q, q + kv, q + 2 * kv]
    for kind, whole in (("proj", attn.pop("qkv_proj", None)), ("bias", attn.pop("qkv_bias", None))):
        if whole is not None:
            for i, name in enumerate(names):
                attn[f"{name}_{kind}"] = whole[(ends[i - 1] if i else 0) : ends[i]]
    for kind, whole in (("proj", mlp.pop("gate_up_proj", None)), ("bias", mlp.pop("gate_up_bias", None))):
        if whole is not None:
            mlp[f"gate_{kind}"], mlp[f"up_{kind}"] = jnp.split(whole, 2)
    return {**params, "attn": attn, "mlp": mlp}


def _project(attn: PyTree, names: tuple[str, ...], sizes: tuple[int, ...], x: Array) -> list[Array]:
    """The projections ``names`` (a tail of q, k, v) of flat inputs, from fused or separate matrices."""
    if "qkv_proj" not in attn:
        return [linear(attn[f"{n}_proj"], x, attn.get(f"{n}_bias")) for n in names]
    weight, bias = attn["qkv_proj"], attn.get("qkv_bias")
    skip = weight.shape[0] - sum(sizes)
    if skip:
        weight, bias = weight[skip:], None if bias is None else bias[skip:]
    y = linear(weight, x, bias)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [y[:, end - size : end] for end, size in zip(ends, sizes, strict=True)]


def keys_values(
    config: DecoderConfig, layer: LayerConfig, attn: PyTree, x: Array, tables: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Keys (normed, rotated) and values ``[T, Hk, D]`` of flat inputs ``[T, d]``.

    A drafter calls this directly on its context, which passes no ``input_layernorm``.
    """
    names = ("k",) if layer.k_eq_v else ("k", "v")
    size = layer.num_kv_heads * layer.head_dim
    raw = _project(attn, names, (size,) * len(names), x)
    return _finish_keys_values(config, layer, attn, raw, tables)


def _finish_keys_values(
    config: DecoderConfig, layer: LayerConfig, attn: PyTree, raw: list[Array], tables: tuple[Array, Array]
) -> tuple[Array, Array]:
    shape = (raw[0].shape[0], layer.num_kv_heads, layer.head_dim)
    k, v = raw[0].reshape(shape), raw[-1].reshape(shape)
    if config.qk_norm:
        k = rms_norm(k, attn["k_norm"], config.rms_norm_eps)
    if config.v_norm:
        v = rms_norm(v, None, config.rms_norm_eps)
    return apply_rope(k, tables), v


def attention_scale(config: DecoderConfig, layer: LayerConfig) -> float:
    """Factor of the scores."""
    return config.attention_scale if config.attention_scale is not None else layer.head_dim**-0.5


def layer_forward(
    config: DecoderConfig,
    layer: LayerConfig,
    params: PyTree,
    x: Array,
    tables: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], tuple[Array, Aux]],
    inputs: Array | None = None,
) -> tuple[Array, Aux]:
    """One layer on flat tokens ``[T, d]``.

    ``attend(q [T,H,D], k [T,Hk,D], v [T,Hk,D]) -> (out [T,H,D], aux)``; aux (a cache) is handed through.
    ``inputs [T, ...]``: what the attention reads; None: the input norm of ``x``.
    """
    eps = config.rms_norm_eps
    tokens = x.shape[0]
    h = rms_norm(x, params["input_layernorm"], eps) if inputs is None else inputs
    attn = params["attn"]
    kv_size = layer.num_kv_heads * layer.head_dim
    kv_names = ("k",) if layer.k_eq_v else ("k", "v")
    sizes = (config.num_heads * layer.head_dim, *(kv_size,) * len(kv_names))
    q, *raw = _project(attn, ("q", *kv_names), sizes, h)
    q = q.reshape(tokens, config.num_heads, layer.head_dim)
    if config.qk_norm:
        q = rms_norm(q, attn["q_norm"], eps)
    q = apply_rope(q, tables)
    k, v = _finish_keys_values(config, layer, attn, raw, tables)
    out, aux = attend(q, k, v)
    a = linear(attn["o_proj"], out.reshape(tokens, -1), attn.get("o_bias"))
    if config.sandwich_norm:
        x = x + rms_norm(a, params["post_attention_layernorm"], eps)
        h = rms_norm(x, params["pre_feedforward_layernorm"], eps)
        m = gated_mlp(params["mlp"], h, config.activation)
        x = x + rms_norm(m, params["post_feedforward_layernorm"], eps)
    else:
        x = x + a
        h = rms_norm(x, params["post_attention_layernorm"], eps)
        x = x + gated_mlp(params["mlp"], h, config.activation)
    if config.layer_scalar:
        # A stored buffer of the reference, never learnt.
        x = x * jax.lax.stop_gradient(params["layer_scalar"])[None, :]
    return x, aux
