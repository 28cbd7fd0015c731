"""Telling a target's weights from others: what was made with a target is not taken for another one's."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DecoderConfig
from dspark_jax.types import PyTree


def weights_digest(target: Any) -> str:
    """Short hash of a target's configuration and of a row or two of its matrices, rounded to bfloat16.

    It is the same however the target was loaded: float32 or bfloat16, layers stacked, projections fused. Merged
    adapters and further training change it, as far as they reach those rows: of q, k, v, o, gate, up and down of every
    layer, of embedding and head. A target of another kind than ``Target`` is hashed by the leaves of its tree.
    """
    params = getattr(target, "params", None)
    if isinstance(params, dict) and "layers" in params:
        parts = list(_rows(params, target.config))
        found = hashlib.sha256(repr(dataclasses.astuple(target.config)).encode())
    else:
        leaves = jax.tree.leaves(target)
        parts, found = [leaf[-1] if leaf.ndim > 1 else leaf for leaf in leaves], hashlib.sha256()
    for row in jax.device_get(parts):
        wide = jnp.issubdtype(row.dtype, jnp.floating)
        found.update(np.ascontiguousarray(row.astype(jnp.bfloat16) if wide else row).tobytes())
    return found.hexdigest()[:16]


def _rows(params: PyTree, config: DecoderConfig) -> Iterator[Any]:
    for name in ("embed_tokens", "norm", "lm_head"):
        for leaf in jax.tree.leaves(params.get(name)):
            yield leaf[-1]
    stacked = not isinstance(params["layers"], list | tuple)
    for i, shape in enumerate(config.layers):
        layer = params["layers"] if stacked else params["layers"][i]
        attn, mlp = layer["attn"], layer["mlp"]
        fused, pair = attn.get("qkv_proj"), mlp.get("gate_up_proj")
        if fused is None:
            ends = [(attn["q_proj"], 0), (attn["k_proj"], 0), (attn.get("v_proj", attn["k_proj"]), -1)]
        else:
            ends = [(fused, 0), (fused, config.num_heads * shape.head_dim), (fused, -1)]
        ends += [(mlp["gate_proj"], 0), (mlp["up_proj"], -1)] if pair is None else [(pair, 0), (pair, -1)]
        for matrix, at in (*ends, (attn["o_proj"], 0), (mlp["down_proj"], 0), (layer["input_layernorm"], 0)):
            for leaf in jax.tree.leaves(matrix):  # two of a quantised one: its rows' integers and scales
                yield leaf[i, at] if stacked else leaf[at]
