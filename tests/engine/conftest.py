"""Engines live for the whole session, since compiling is what costs; ``fresh`` makes one empty again."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from dspark_jax.engine import Engine
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget
from tests.engine.cases import engine_config, fresh, scripted_models


@pytest.fixture(autouse=True)
def _float64(x64: None) -> None:
    """Token-exact claims are made in float64."""


@pytest.fixture(scope="session")
def models() -> tuple[ScriptedTarget, ScriptedDrafter]:
    with jax.enable_x64(True):
        return scripted_models()


@pytest.fixture(scope="session")
def fixed_engine(models: tuple[Any, Any]) -> Engine:
    with jax.enable_x64(True):
        return Engine(*models, engine_config())


@pytest.fixture
def fixed(fixed_engine: Engine) -> Engine:
    """Fixed verification, nothing in it."""
    return fresh(fixed_engine)
