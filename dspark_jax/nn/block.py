"""One transformer layer, and the abstract tree of its parameters, for targets and drafter backbones alike.

The caller brings the attention (over a cache, over context and block, over packed training blocks) as a function;
family differences are fields of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from dspark_jax.config import DecoderConfig, LayerConfig
from dspark_jax.nn.linear import linear
from dspark_jax.nn.mlp import gated_mlp
from dspark_jax.nn.norm import rms_norm
from dspark_jax.nn.rope import apply_rope
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree

Aux = TypeVar("Aux")


def layer_specs(config: DecoderConfig, layer: LayerConfig, prefix: str) -> PyTree:
    """Parameters of one layer; ``prefix`` is e.g. ``model.layers.3.``."""
    d, ff = config.hidden_size, config.intermediate_size
    q_out, kv_out = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def matrix(name: str, out: int, inner: int, axes: tuple[str | None, str | None]) -> ParamSpec:
        scale = 1.0 / math.sqrt(inner)
        return ParamSpec((out, inner), axes, f"{prefix}{name}.weight", scale=scale)

    def bias(name: str, out: int, axis: str | None) -> ParamSpec:
        return ParamSpec((out,), (axis,), f"{prefix}{name}.bias", init="zeros")

    def norm(name: str, size: int = d) -> ParamSpec:
        return ParamSpec((size,), (None,), f"{prefix}{name}.weight", init="ones")

    attn = {
        "q_proj": matrix("self_attn.q_proj", q_out, d, ("heads", "embed")),
        "k_proj": matrix("self_attn.k_proj", kv_out, d, ("kv_heads", "embed")),
        "o_proj": matrix("self_attn.o_proj", d, q_out, ("embed", "heads")),
    }
    if not layer.k_eq_v:
        attn["v_proj"] = matrix("self_attn.v_proj", kv_out, d, ("kv_heads", "embed"))
    if config.attention_bias:
        for name, out, axis in (("q", q_out, "heads"), ("k", kv_out, "kv_heads"), ("v", kv_out, "kv_heads")):
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


def keys_values(
    config: DecoderConfig, layer: LayerConfig, attn: PyTree, x: Array, tables: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Keys (normed, rotated) and values ``[T, Hk, D]`` of flat inputs ``[T, d]``.

    A drafter calls this directly on its context, which passes no ``input_layernorm``.
    """
    shape = (x.shape[0], layer.num_kv_heads, layer.head_dim)
    raw = linear(attn["k_proj"], x, attn.get("k_bias")).reshape(shape)
    v = raw if layer.k_eq_v else linear(attn["v_proj"], x, attn.get("v_bias")).reshape(shape)
    k = rms_norm(raw, attn["k_norm"], config.rms_norm_eps) if config.qk_norm else raw
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
) -> tuple[Array, Aux]:
    """One layer on flat tokens ``[T, d]``.

    ``attend(q [T,H,D], k [T,Hk,D], v [T,Hk,D]) -> (out [T,H,D], aux)``; aux (a cache) is handed through.
    """
    eps = config.rms_norm_eps
    tokens = x.shape[0]
    h = rms_norm(x, params["input_layernorm"], eps)
    attn = params["attn"]
    q = linear(attn["q_proj"], h, attn.get("q_bias")).reshape(tokens, config.num_heads, layer.head_dim)
    if config.qk_norm:
        q = rms_norm(q, attn["q_norm"], eps)
    q = apply_rope(q, tables)
    k, v = keys_values(config, layer, attn, h, tables)
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
        x = x * params["layer_scalar"][None, :]
    return x, aux
