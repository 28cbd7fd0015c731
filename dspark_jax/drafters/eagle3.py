"""EAGLE-3 (Li et al., arXiv:2503.01840): a chain over fused low, middle and high target states.

The attention reads the norms of embedding and hidden state side by side; the residual stream carries the hidden
state alone. DeepSpec fuses five target layers, speculators three; its checkpoints may also switch norms on
(``Eagle3Norms``).
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


def eagle3_specs(config: DrafterConfig) -> PyTree:
    """Abstract parameters, with the tensor names that DeepSpec and speculators share."""
    decoder, taps = config.decoder, len(config.target_layer_ids)
    d = decoder.hidden_size

    def norm(name: str, size: int = d) -> ParamSpec:
        return ParamSpec((size,), (None,), f"{name}.weight", init="ones")

    layer = layer_specs(decoder, decoder.layers[0], "layers.0.", attention_inputs=2 * d)
    specs = {
        "fc": ParamSpec((d, taps * d), ("embed", None), "fc.weight", scale=1 / math.sqrt(taps * d)),
        "layers": [{**layer, "hidden_norm": norm("layers.0.hidden_norm")}],
        "norm": norm("norm"),
    }
    if config.norms.before_fc:
        specs["input_norm"] = norm("input_norm", taps * d)
    if config.norms.each_feature:
        specs["fc_norm"] = [norm(f"fc_norm.{i}") for i in range(taps)]
    return specs


class Eagle3Drafter(ChainDrafter):
    """A loaded EAGLE-3 drafter; implements the contract of ``drafters/base.py``."""

    @staticmethod
    def specs(config: DrafterConfig) -> PyTree:
        """See ``eagle3_specs``."""
        return eagle3_specs(config)

    def condense(self, features: Array) -> Array:
        """``fc`` of the concatenated taps ``[T, m * d]``, normed before where the checkpoint was trained so."""
        eps = self.config.decoder.rms_norm_eps
        if self.config.norms.before_fc:
            features = rms_norm(features, self.params["input_norm"], eps)
        if self.config.norms.each_feature:
            taps = jnp.split(features, len(self.params["fc_norm"]), axis=-1)
            normed = [rms_norm(x, w, eps) for x, w in zip(taps, self.params["fc_norm"], strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return linear(self.params["fc"], features)

    def join(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """The residual stream carries the hidden state; the attention reads ``[norm(embedding); norm(hidden)]``."""
        layer, eps = self.params["layers"][0], self.config.decoder.rms_norm_eps
        normed = rms_norm(hidden, layer["hidden_norm"], eps)
        read = jnp.concatenate([rms_norm(embedded, layer["input_layernorm"], eps), normed], axis=-1)
        return (normed if self.config.norms.before_residual else hidden), read

    def carry(self, state: Array, normed: Array) -> Array:
        """The layer's output, or its norm where the checkpoint was trained so."""
        return normed if self.config.norms.output else state
