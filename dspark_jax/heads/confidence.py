"""Confidence head (paper section 3.2.1): how likely a draft survives, given that those before it did.

The logit at position k reads the backbone's state and the token *before* k, never the token drawn at k: that is
what lets a scheduler act on it without bias (DESIGN section 2, idea 5). The bias is the release's, not the paper's.
"""

from __future__ import annotations

import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.nn.linear import linear
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree, accumulate_dtype


def confidence_specs(config: DrafterConfig, prefix: str = "confidence_head.") -> PyTree:
    """Abstract parameters of the head."""
    size = config.decoder.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
    return {
        "proj": ParamSpec((1, size), (None, "embed"), f"{prefix}proj.weight"),
        "bias": ParamSpec((1,), (None,), f"{prefix}proj.bias", init="zeros"),
    }


def confidence_logits(config: DrafterConfig, params: PyTree, h: Array, e: Array | None) -> Array:
    """Logits ``[...]`` of conditional acceptance from ``h [..., d]`` and ``e [..., r]`` (W1 of the token before)."""
    x = h
    if config.confidence_with_markov:
        if e is None:
            raise ValueError("this confidence head reads the Markov embedding, but the drafter has no Markov head")
        x = jnp.concatenate([h, e], axis=-1)
    return linear(params["proj"], x, params["bias"], out_dtype=accumulate_dtype(x.dtype))[..., 0]
