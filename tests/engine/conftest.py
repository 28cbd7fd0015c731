"""Engines live for the whole session, since compiling is what costs; ``fresh`` makes one empty again."""

from __future__ import annotations

import jax
import pytest

from dspark_jax.engine import Engine
from tests.engine.cases import Models, Watched, engine_config, fresh, scripted_models, step_times


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


@pytest.fixture
def fixed(fixed_engine: Engine) -> Engine:
    """Fixed verification, nothing in it."""
    return fresh(fixed_engine)
