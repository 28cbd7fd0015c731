"""A target's weights are known again however they were loaded, and are not taken for others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.nn.linear import Int8Matrix, quantize_rows
from dspark_jax.params import init
from dspark_jax.targets import Target, decoder_specs, weights_digest

LAYER = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
CONFIG = DecoderConfig("llama", 24, 16, 32, 2, (LAYER,) * 2, tie_embeddings=True, max_positions=64)


def quantized(params: Any) -> Any:
    """The layers' matrices as ``load_target(..., quantization="int8")`` makes them."""

    def matrix(x: Any) -> Any:
        if x.ndim != 2:
            return x
        values, scale = quantize_rows(np.asarray(x))
        return Int8Matrix(jnp.asarray(values), jnp.asarray(scale))

    return {**params, "layers": jax.tree.map(matrix, params["layers"])}


def test_a_digest_does_not_depend_on_how_a_target_was_loaded() -> None:
    """Stacked or not, fused or not, float32 or bfloat16; matrices of integers are other weights, in each form alike."""
    params = init(decoder_specs(CONFIG), jax.random.key(0), jnp.float32)
    forms: Any = ({"scan": False, "fuse": False}, {"scan": True, "fuse": False}, {"scan": False, "fuse": True})
    found = {weights_digest(Target.build(params, CONFIG, **form)) for form in forms}
    eight = {weights_digest(Target.build(quantized(params), CONFIG, **form)) for form in forms}
    assert len(eight) == 1 and eight != found
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert found | {weights_digest(Target.build(half, CONFIG, scan=False))} == found and len(found) == 1


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_merged_adapter_of_one_layer_changes_it(name: str, fuse: bool) -> None:
    """As LoRA leaves a target: norms, embedding and head stay."""
    params = init(decoder_specs(CONFIG), jax.random.key(0), jnp.float32)
    before = weights_digest(Target.build(params, CONFIG, scan=False, fuse=fuse))
    part = params["layers"][1]["attn" if name in params["layers"][1]["attn"] else "mlp"]
    part[name] = part[name] + 0.1
    assert weights_digest(Target.build(params, CONFIG, scan=False, fuse=fuse)) != before
