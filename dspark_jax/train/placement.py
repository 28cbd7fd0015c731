"""Data parallel: a batch split over devices, everything else on each of them. One process or many.

The step is one program over the whole batch, so its sums, and the denominators of the loss, are global by themselves.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


class Placement:
    """Where a run's arrays live.

    Args:
        devices: 0: all of all processes; 1 in a single process: JAX's default device. batch: sequences a step.

    Raises ValueError where there are too few devices, or the batch cannot be split.
    """

    def __init__(self, devices: int, batch: int) -> None:
        known = jax.devices()
        count = len(known) if devices == 0 else devices
        if count > len(known):
            raise ValueError(f"devices = {devices}, but there are {len(known)}")
        if jax.process_count() > 1 and count < len(known):
            raise ValueError(f"devices = {devices}: {jax.process_count()} processes use all {len(known)} devices (0)")
        if batch % count:
            raise ValueError(f"data.batch = {batch} cannot be split over {count} devices")
        self._mesh = None if count == 1 else Mesh(np.asarray(known[:count]), (AXIS,))

    def everywhere(self, tree: Any) -> Any:
        """Whole arrays on every device. Every process brings the same values."""
        return tree if self._mesh is None else jax.tree.map(lambda x: self._put(x, PartitionSpec()), tree)

    def split(self, array: np.ndarray) -> Any:
        """``[B, ...]`` split over the devices. Every process brings the whole batch."""
        return jax.numpy.asarray(array) if self._mesh is None else self._put(array, PartitionSpec(AXIS))

    def _put(self, x: Any, spec: PartitionSpec) -> Any:
        values = np.asarray(x)
        return jax.make_array_from_callback(values.shape, NamedSharding(self._mesh, spec), lambda at: values[at])  # type: ignore[arg-type]
