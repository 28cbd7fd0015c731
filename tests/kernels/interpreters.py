"""Interpreters that run a GPU's or a TPU's kernel on a CPU, with their race detectors on."""

from __future__ import annotations

from typing import Any

import jax
import pytest


def mosaic_gpu() -> Any:
    """Interpreter parameters for Mosaic GPU; skips where this JAX cannot interpret our kernels."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("the Mosaic GPU interpreter of JAX 0.10 takes no transposed operand of wgmma")
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


def no_race_on_gpu() -> None:
    """Fails if the last interpreted Mosaic GPU kernel raced."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    races = gpu_callbacks.get_races()
    assert races is not None and not races.races_found


def tpu() -> Any:
    """Interpreter parameters for Pallas TPU."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(detect_races=True)


def no_race_on_tpu() -> None:
    """Fails if the last interpreted TPU kernel raced."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    assert interpreter.races is not None and not interpreter.races.races_found
