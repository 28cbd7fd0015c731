"""Interpreters that run a GPU's or a TPU's kernel on a CPU, with their race detectors on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def triton() -> Any:
    """Triton's own interpreter, which computes with numpy. TRITON_INTERPRET=1 must be set before triton is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 is not set: test_triton.py starts a process that has it")
    return _triton_on_numpy


def _triton_on_numpy(
    kernel: Any, inputs: Sequence[jax.Array], out_types: Sequence[Any], grid: tuple[int, ...], sizes: dict[str, Any]
) -> Any:
    """See ``triton_call.call``. bfloat16 becomes float32, which holds the same numbers: the interpreter keeps its bits
    in integers and multiplies those."""
    inputs = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in inputs]

    def run(*arrays: Any) -> list[np.ndarray]:
        given = [_HostTensor(np.ascontiguousarray(a)) for a in arrays]
        made = [_HostTensor(np.empty(t.shape, t.dtype)) for t in out_types]
        with np.errstate(all="ignore"):  # no GPU warns of inf - inf
            kernel[grid](*given, *made, **sizes)
        return [tensor.array for tensor in made]

    return jax.pure_callback(run, list(out_types), *inputs)


class _HostTensor:
    """As much of a tensor as Triton's interpreter asks of one: memory on the host, which is its own storage."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _HostTensor:
        return self

    def cpu(self) -> _HostTensor:
        return self

    def new_empty(self, *size: int, device: str) -> _HostTensor:
        return _HostTensor(np.empty(0, self.array.dtype))

    def set_(self, storage: _HostTensor, offset: int, size: Any, stride: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: _HostTensor) -> None:
        """Interpreted in place: there is nothing to copy."""
