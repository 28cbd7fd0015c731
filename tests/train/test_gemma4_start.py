"""What differs where the drafter to train is Gemma 4's: layers of two shapes to copy from, and a stored buffer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.drafters import drafter_specs
from dspark_jax.params import init
from dspark_jax.targets import Target
from dspark_jax.train.config import OptimConfig
from dspark_jax.train.optim import averaged, keep_buffers, optimizer
from dspark_jax.train.warm_start import initial_params
from tests.oracle import oracle_dir
from tests.train.oracle_case import load_case


@pytest.fixture(scope="module")
def target() -> Target:
    return dspark_jax.load_target(oracle_dir() / "targets" / "gemma4_tiny", dtype="float32")


def test_full_layers_can_be_copied_and_sliding_ones_are_refused(target: Target) -> None:
    config = load_case("gemma4_dspark").config
    params = initial_params(target, config, jax.random.key(0), copy_layers=(2, 5))
    copied = np.asarray(params["layers"][1]["attn"]["k_proj"])
    fused = np.asarray(target.params["layers"][5]["attn"]["qkv_proj"])
    np.testing.assert_array_equal(copied, fused[-len(copied) :])
    with pytest.raises(ValueError, match=r"layers \[4\] of the target have not the shape of the drafter's"):
        initial_params(target, config, jax.random.key(0), copy_layers=(4, 5))


def test_the_layer_scalar_is_no_weight() -> None:
    """No update reaches it, weight decay included; its gradient is zero (the reference stores a buffer)."""
    params = init(drafter_specs(load_case("gemma4_dspark").config), jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, params)
    kept = keep_buffers(ones)
    assert all(float(layer["layer_scalar"][0]) == 0.0 for layer in kept["layers"])
    total = sum(float(x.sum()) for x in jax.tree.leaves(kept))
    assert total == sum(x.size for x in jax.tree.leaves(params)) - len(kept["layers"])


def test_the_mean_of_the_parameters_leaves_the_layer_scalar_alone() -> None:
    """Weight decay would pull it towards zero in the mean, which is what is exported."""
    params = {"w": jnp.array([2.0]), "layer_scalar": jnp.array([2.0])}
    rule = optimizer(OptimConfig(weight_decay=0.5, ema_decay=0.5), 0.1)
    _, state = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    mean = averaged(params, state)
    assert float(mean["layer_scalar"][0]) == 2.0 and float(mean["w"][0]) < 2.0
