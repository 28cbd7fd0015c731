"""Optimiser and schedules against the reference's trajectories."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.train.config import OptimConfig
from dspark_jax.train.optim import clip_by_global_norm, optimizer, schedule
from tests.oracle import oracle_dir


@pytest.mark.parametrize("case", [0, 1])
def test_trajectories_equal_the_reference(case: int) -> None:
    """Warm-up, cosine with its overshoot, clipping with its denominator, decoupled decay: every step's weights."""
    arrays = np.load(oracle_dir() / "optim" / "cases.npz")
    data = {k.removeprefix(f"o{case}."): arrays[k] for k in arrays.files if k.startswith(f"o{case}.")}
    total = int(data["total_steps"])
    config = OptimConfig(
        learning_rate=float(data["lr"]),
        schedule="cosine",
        warmup_steps=int(float(data["warmup_ratio"]) * total),
        total_steps=total,
        weight_decay=float(data["weight_decay"]),
        max_grad_norm=float(data["max_grad_norm"]),
    )
    params = {"w": jnp.asarray(data["weight0"]), "b": jnp.asarray(data["bias0"])}
    state = optimizer(config, 0.0).init(params)
    rate_of = schedule(config)

    @jax.jit
    def step(params, state, gradient, rate):  # type: ignore[no-untyped-def]
        updates, state = optimizer(config, rate).update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(len(data["grad_norm"])):
        gradient = {"w": jnp.asarray(data["grad_weight"][t]), "b": jnp.asarray(data["grad_bias"][t])}
        rate = rate_of(t)
        np.testing.assert_allclose(rate, data["lr_used"][t], rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(optax.tree.norm(gradient), data["grad_norm"][t], rtol=1e-5)
        params, state = step(params, state, gradient, rate)
        np.testing.assert_allclose(params["w"], data["weight"][t], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(params["b"], data["bias"][t], rtol=2e-5, atol=1e-6)


def test_wsd_is_constant_between_warm_up_and_decay() -> None:
    rate = schedule(OptimConfig(1.0, "wsd", warmup_steps=4, total_steps=20, decay_steps=5))
    assert [float(rate(t)) for t in (0, 3, 4, 14)] == [0.25, 1.0, 1.0, 1.0]
    np.testing.assert_allclose([float(rate(t)) for t in (15, 16, 19, 20)], [1.0, 0.8, 0.2, 0.0], rtol=1e-6)


def test_a_later_end_changes_nothing_before_the_decay() -> None:
    """A run on borrowed time may be told to end earlier or later while its rate is constant."""
    short, long = (schedule(OptimConfig(1.0, "wsd", 4, total, 5)) for total in (20, 30))
    assert all(float(short(t)) == float(long(t)) for t in range(16))


def test_small_gradients_are_not_scaled() -> None:
    rule = clip_by_global_norm(1.0)
    small, big = {"w": jnp.array([0.3, 0.4])}, {"w": jnp.array([3.0, 4.0])}
    assert (rule.update(small, optax.EmptyState())[0]["w"] == small["w"]).all()
    np.testing.assert_allclose(rule.update(big, optax.EmptyState())[0]["w"], [0.6, 0.8], rtol=1e-6)
