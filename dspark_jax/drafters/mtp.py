"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): one module, applied again and again.

The module norms hidden state and embedding, projects the pair back to one stream (equation 21, hidden state first),
and runs one decoder layer; the target's head reads its norm. The first hidden state is the output of the target's
last decoder layer, before the target's own norm: the module has a norm for it.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.nn.block import layer_specs
from dspark_jax.nn.linear import linear
from dspark_jax.nn.norm import rms_norm
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree


def mtp_specs(config: DrafterConfig) -> PyTree:
    """Abstract parameters, named in the manner of DeepSpec (the layout is ours)."""
    decoder = config.decoder
    d = decoder.hidden_size

    def norm(name: str) -> ParamSpec:
        return ParamSpec((d,), (None,), f"{name}.weight", init="ones")

    return {
        "hidden_norm": norm("hidden_norm"),
        "embed_norm": norm("embed_norm"),
        "fc": ParamSpec((d, 2 * d), ("embed", None), "fc.weight", scale=1 / math.sqrt(2 * d)),
        "layers": [layer_specs(decoder, decoder.layers[0], "layers.0.")],
        "norm": norm("norm"),
    }


class MTPDrafter(ChainDrafter):
    """A loaded MTP module; implements the contract of ``drafters/base.py``."""

    @staticmethod
    def specs(config: DrafterConfig) -> PyTree:
        """See ``mtp_specs``."""
        return mtp_specs(config)

    def condense(self, features: Array) -> Array:
        """The one tapped state ``[T, d]``."""
        return features

    def join(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """The projected pair is the residual stream; the attention reads its norm."""
        eps = self.config.decoder.rms_norm_eps
        pair = [rms_norm(hidden, self.params["hidden_norm"], eps), rms_norm(embedded, self.params["embed_norm"], eps)]
        x = linear(self.params["fc"], jnp.concatenate(pair, axis=-1))
        return x, rms_norm(x, self.params["layers"][0]["input_layernorm"], eps)
