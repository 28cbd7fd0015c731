"""Compiling for an H100, an A100 or a TPU on a machine that has none of them.

The plugin wheels (extras ``aot`` and ``aot_tpu``) carry the real compilers; only a description of the device is
needed. JAX_PLATFORMS=cpu must be set before jax is imported, else the plugins look for a device and stay away.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Published figures of the H100 SXM with 80 GB (NVIDIA's data sheet and CUDA's occupancy tables).
H100 = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "core_count": 132,
    "fpus_per_core": 128,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352320000000,
    "device_memory_size": 84942979072,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
}
# The same of the A100 SXM with 80 GB, where they differ.
A100 = {
    **H100,
    "shared_memory_per_core": 167936,
    "shared_memory_per_block_optin": 166912,
    "core_count": 108,
    "fpus_per_core": 64,
    "memory_bandwidth": 2039000000000,
    "device_memory_size": 84987740160,
    "l2_cache_size": 41943040,
    "clock_rate_ghz": 1.41,
}
# Name of the device, compute capability, figures.
_CARDS = {"H100": ("NVIDIA H100 80GB HBM3", 9, H100), "A100": ("NVIDIA A100-SXM4-80GB", 8, A100)}


def _gpu_config(card: str, toolkit: tuple[int, int, int]) -> str:
    """XLA's GpuTargetConfigProto in text form."""
    name, major, figures = _CARDS[card]
    facts = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    dotted = ".".join(map(str, toolkit))
    return f"""
gpu_device_info {{
{facts}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  driver_version: "{dotted}"
  runtime_version: "{dotted}"
  compile_time_toolkit_version: "{dotted}"
  device_vendor: "NVIDIA Corporation"
  name: "{name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: {toolkit[0]} minor: {toolkit[1]} patch: {toolkit[2]} }}
device_description_str: "{name}"
"""


def missing_h100() -> str | None:
    """Why nothing can be compiled for an H100 here; None if it can."""
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return "JAX_PLATFORMS=cpu is not set, so the CUDA plugin looks for a device"
    for major in (13, 12):
        if importlib.util.find_spec(f"jax_cuda{major}_plugin"):
            return None
    return "no jax-cuda plugin wheel (extra: aot)"


def missing_tpu() -> str | None:
    """Why nothing can be compiled for a TPU here; None if it can."""
    return None if importlib.util.find_spec("libtpu") else "no libtpu (extra: aot_tpu)"


def h100_mesh(devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of H100s in one host, for compiling only."""
    return gpu_mesh("H100", devices, axis)


def gpu_mesh(card: str, devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of GPUs (``H100`` or ``A100``) in one host, for compiling only."""
    toolkit = (13, 0, 0) if importlib.util.find_spec("jax_cuda13_plugin") else (12, 9, 0)
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=_gpu_config(card, toolkit), topology=f"1x1x{devices}"
    )
    return topologies.make_mesh(topology, (devices,), (axis,))


def tpu_mesh(topology: str = "v5e:2x2", devices: int = 1, axis: str = "model") -> Mesh:
    """A mesh of the first ``devices`` chips of a TPU topology (``v5e:2x2``, ``v6e:2x4``), for compiling only."""
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    described = topologies.get_topology_desc(topology, platform="tpu")
    return Mesh(described.devices[:devices], (axis,))


def abstract(
    mesh: Mesh, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *spec: str | None
) -> jax.ShapeDtypeStruct:
    """An array that is only described, replicated or sharded over ``mesh``."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


@contextmanager
def as_if_on(platform: str) -> Iterator[None]:
    """While it lasts code is traced in the forms of ``gpu`` or ``tpu``, which it chooses by JAX's default backend."""
    own = jax.default_backend
    jax.default_backend = lambda: platform
    try:
        yield
    finally:
        jax.default_backend = own
