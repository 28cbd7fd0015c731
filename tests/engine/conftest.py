"""Engines live for the whole session, since compiling is what costs; ``fresh`` makes one empty again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.engine import Engine
from dspark_jax.testing import tiny_drafter, tiny_target
from tests.engine.cases import (
    CHAIN_BLOCK,
    Models,
    Watched,
    chain_models,
    engine_config,
    fresh,
    scripted_models,
    step_times,
)


@pytest.fixture(autouse=True)
def _float64(x64: None) -> None:
    """Token-exact claims are made in float64."""


@pytest.fixture(scope="session")
def models() -> Models:
    with jax.enable_x64(True):
        return scripted_models()


@pytest.fixture(scope="session")
def fixed_engine(models: Models) -> Engine:
    target, drafter = models
    with jax.enable_x64(True):
        watched = Watched(target.table, target.order, target.max_positions)
        return Engine(watched, drafter, engine_config(context_buckets=(24,)))


@pytest.fixture(scope="session")
def lagged_engine(models: Models) -> Engine:
    config = engine_config(mode="lagged", step_time=step_times(), slot_buckets=(4,), token_buckets=(8, 12))
    with jax.enable_x64(True):
        engine = Engine(*models, config)
        engine.warmup()
        return engine


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, Any]:
    """Real attention, real caches, in float64."""
    with jax.enable_x64(True):
        target = tiny_target(dtype=jnp.float64, num_layers=1)
        return target, tiny_drafter(target, block_size=2, target_layer_ids=(0,))


@pytest.fixture(scope="session")
def tiny_engine(tiny: tuple[Any, Any]) -> Engine:
    with jax.enable_x64(True):
        engine = Engine(*tiny, engine_config(max_num_seqs=3, slot_buckets=(2,)))
        engine.warmup()  # two compilations at a time
        return engine


@pytest.fixture(scope="session")
def chain() -> tuple[Any, Any]:
    """A drafter that pairs each token with the state before it."""
    with jax.enable_x64(True):
        return chain_models()


@pytest.fixture(scope="session")
def chain_engine(chain: tuple[Any, Any]) -> Engine:
    config = engine_config(max_num_seqs=2, num_speculative_tokens=CHAIN_BLOCK, prefill_buckets=(4,), slot_buckets=(1,))
    with jax.enable_x64(True):
        return Engine(*chain, config)


@pytest.fixture
def fixed(fixed_engine: Engine) -> Engine:
    """Fixed verification, nothing in it."""
    return fresh(fixed_engine)
