"""Logical axes to mesh axes. A parameter says what its axes mean; this file alone says where they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.params import ParamSpec
from dspark_jax.types import Array

RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "rank": None,
    "layer": None,
}
"""Tensor parallelism: matrices are cut along heads, hidden units of the MLP and the vocabulary."""


def partition_spec(spec: ParamSpec, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """Where a parameter lives on ``mesh``.

    Raises ValueError where two of its axes map to the same mesh axis, a logical axis is unknown, or a dimension
    is not divisible by its mesh axis.
    """
    places: list[str | None] = []
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(f"{spec.name}: unknown logical axis {axis!r}; known: {sorted(rules)}")
        place = rules[axis] if axis is not None else None
        if place is not None and place not in mesh.axis_names:
            place = None
        if place is not None and place in places:
            raise ValueError(f"{spec.name}: two axes of {spec.axes} map to mesh axis {place!r}")
        if place is not None and size % mesh.shape[place]:
            raise ValueError(
                f"{spec.name}: axis {axis!r} of size {size} is not divisible by the {mesh.shape[place]} devices of "
                f"mesh axis {place!r}; choose a tensor parallel size that divides it"
            )
        places.append(place)
    return PartitionSpec(*places)


def putter(mesh: Mesh | None) -> Callable[[np.ndarray, ParamSpec], Array]:
    """A function that places one host array on the default device (``mesh`` None) or across a mesh."""
    if mesh is None:
        return lambda array, spec: jnp.asarray(array)
    return lambda array, spec: jax.device_put(array, NamedSharding(mesh, partition_spec(spec, mesh)))
