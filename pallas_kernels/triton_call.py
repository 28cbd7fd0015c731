"""Triton kernels in JAX programs, through jax-triton. Nothing here imports either before a kernel is really taken."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import device_kind

_REMEDY = "pip install -e '.[triton]' (jax-triton>=0.3.1,<0.4 and triton)"
# What is compiled for where the device is only described. Code for 8.0 runs on all cards of 8.x.
_CAPABILITY = {"ampere": 80, "hopper": 90}


@functools.cache
def missing() -> str | None:
    """Why no Triton kernel can be put into a program here; None if one can. Looks, and imports nothing."""
    for package, name in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(package) is None:
            return f"{name} is not installed: {_REMEDY}"
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        version = "of an unknown version"
    if not version.startswith("0.3."):
        return f"jax-triton is {version}, of which other arguments are wanted: {_REMEDY}"
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (13, 12)):
        return "JAX has no CUDA plugin, which jax-triton needs: pip install 'dspark-jax[cuda]'"
    return None


def call(
    kernel: Any,
    inputs: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    interpret: Callable[..., Any] | None = None,
    **sizes: int | bool,
) -> list[jax.Array]:
    """Runs ``kernel(*inputs, *outputs, **sizes)`` on every cell of ``grid``.

    Args:
        kernel: of ``triton.jit``, its ``sizes`` annotated as ``tl.constexpr``.
        interpret: ``(kernel, inputs, out_types, grid, sizes) -> outputs`` in place of the compiled kernel.
    """
    if interpret is not None:
        return list(interpret(kernel, inputs, out_types, grid, sizes))
    import jax_triton

    described = jax.sharding.get_abstract_mesh().abstract_device is not None
    return list(
        jax_triton.triton_call(
            *inputs,
            kernel=kernel,
            out_shape=list(out_types),
            grid=grid,
            num_warps=warps,
            num_stages=2,
            # None: of the card that is there.
            compute_capability=_CAPABILITY.get(device_kind()) if described else None,
            **sizes,
        )
    )
