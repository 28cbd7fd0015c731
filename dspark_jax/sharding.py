"""Logical axes to mesh axes. A parameter says what its axes mean; this file alone says where they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.params import ParamSpec, is_spec
from dspark_jax.types import Array, PyTree

RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "lookup": None,
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "rank": None,
    "layer": None,
}
"""Tensor parallelism: matrices are cut along heads, hidden units of the MLP and the vocabulary.

``lookup`` is a vocabulary whose rows are only looked up, one after the other inside a block (W1 of a Markov head):
whole on every device it costs 78 MB for Qwen3, cut it costs an exchange between all devices for every draft.
"""


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


def abstract(tree: PyTree, dtype: Any, mesh: Mesh) -> PyTree:
    """The tree of ``jax.ShapeDtypeStruct``, placed on ``mesh``, that a restored tree would have: for compiling without
    weights, and without devices."""

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, partition_spec(spec, mesh))
        return jax.ShapeDtypeStruct(spec.shape, jnp.int32 if spec.integer else dtype, sharding=place)

    return jax.tree.map(shape, tree, is_leaf=is_spec)


def stacked(layers: Sequence[PyTree]) -> PyTree:
    """``params.stack_layers`` of placed shapes."""

    def stack(first: Any, *others: Any) -> jax.ShapeDtypeStruct:
        place = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
        return jax.ShapeDtypeStruct((1 + len(others), *first.shape), first.dtype, sharding=place)

    return jax.tree.map(stack, *layers)


def place(params: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Parameters at hand, spread over ``mesh`` as ``load_target(mesh=...)`` would have them."""
    return jax.tree.map(putter(mesh), params, specs)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh of several devices that the leaves of a tree are spread over; None where they are on one."""
    for leaf in jax.tree.leaves(tree):
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and place.mesh.size > 1:
            return place.mesh  # type: ignore[return-value]
    return None


def tracing_on(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """While it lasts ``cut_vocab`` knows the mesh that a program is traced for."""
    return nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def cut_vocab(x: Array) -> Array:
    """Keeps ``[..., V]`` cut along the vocabulary as the LM head is. Without a word at what goes into a conditional, at
    what each branch makes and at its result, the compiler gathers the logits of every device there."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = RULES["vocab"]
    if axis not in mesh.axis_names or x.shape[-1] % mesh.shape[axis]:
        return x
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[free] * (x.ndim - 1), axis))


def putter(mesh: Mesh | None) -> Callable[[np.ndarray, ParamSpec], Array]:
    """A function that places one host array on the default device (``mesh`` None) or across a mesh.

    Every process of a mesh brings the whole array; each device takes its own part.
    """
    if mesh is None:
        return lambda array, spec: jnp.asarray(array)
    own = Mesh(mesh.devices, mesh.axis_names)  # axes of type Auto, whatever the caller's are

    def put(array: np.ndarray, spec: ParamSpec) -> Array:
        return spread(array, NamedSharding(own, partition_spec(spec, own)))

    return put


def spread(array: Any, place: NamedSharding) -> Array:
    """One array that every process has, across the devices of all of them."""
    if jax.process_count() == 1:
        return jax.device_put(array, place)
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, place, lambda at: values[at])
