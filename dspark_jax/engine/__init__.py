"""Continuous batching: requests in, tokens out. ``loop.py`` is the place to start reading."""

from __future__ import annotations

from dspark_jax.engine.config import MODES, EngineConfig
from dspark_jax.engine.loop import Engine
from dspark_jax.engine.request import Event, Request, Result

__all__ = ["MODES", "Engine", "EngineConfig", "Event", "Request", "Result"]
