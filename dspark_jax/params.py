"""ParamSpec trees: one abstract tree drives initialisation, sharding, restoring and conversion.

A model describes its parameters once, as a nested dict (lists for layers) of ``ParamSpec``. Everything else is a
``tree_map`` over it. Matrices are stored ``[out, in]`` as in PyTorch checkpoints, which is also the fast
orientation on CPU (see ``nn/linear.py``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, logical axes, name in a checkpoint and initial law.

    Attributes:
        shape: array shape.
        axes: one logical axis name a dimension (``sharding.py`` maps them to mesh axes), None where replicated.
        name: tensor name in a Hugging Face style checkpoint.
        init: ``"normal"`` (standard deviation ``scale``), ``"ones"`` or ``"zeros"``.
        scale: standard deviation of ``normal``.
        optional: a checkpoint may lack the tensor; the restored value is then None.
        integer: holds token ids, never cast to a float dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str = ""
    init: str = "normal"
    scale: float = 0.02
    optional: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"parameter {self.name!r}: {len(self.axes)} axes for shape {self.shape}")


def is_spec(x: Any) -> bool:
    """True for the leaves of an abstract tree."""
    return isinstance(x, ParamSpec)


def spec_leaves(tree: PyTree) -> list[ParamSpec]:
    """All ParamSpecs of a tree, in tree order."""
    return jax.tree.leaves(tree, is_leaf=is_spec)


def abstract(tree: PyTree, dtype: Any) -> PyTree:
    """The tree of ``jax.ShapeDtypeStruct`` that a restored tree would have."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.int32 if s.integer else dtype), tree, is_leaf=is_spec
    )


def count(tree: PyTree) -> int:
    """Number of scalars in an abstract tree."""
    total = 0
    for spec in spec_leaves(tree):
        size = 1
        for n in spec.shape:
            size *= n
        total += size
    return total


def init(tree: PyTree, key: Array, dtype: Any = jnp.float32) -> PyTree:
    """Random parameters: every leaf drawn from its own key, so that adding one leaves the others unchanged."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_spec)
    values = []
    for i, spec in enumerate(leaves):
        if spec.integer:
            values.append(jnp.arange(spec.shape[0], dtype=jnp.int32))
        elif spec.init == "ones":
            values.append(jnp.ones(spec.shape, dtype))
        elif spec.init == "zeros":
            values.append(jnp.zeros(spec.shape, dtype))
        elif spec.init == "normal":
            noise = jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32)
            values.append((spec.scale * noise).astype(dtype))
        else:
            raise ValueError(f"parameter {spec.name!r}: unknown initial law {spec.init!r}")
    return jax.tree.unflatten(structure, values)


def stack_layers(layers: list[PyTree]) -> PyTree:
    """Per-layer trees of equal shapes stacked on a new leading axis, the form that ``lax.scan`` walks."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def spread(tree: PyTree) -> bool:
    """Some array of the tree lives on several devices, as far as they tell: traced ones do not, described ones do."""
    told = (getattr(a, "sharding", None) for a in jax.tree.leaves(tree) if not isinstance(a, jax.core.Tracer))
    return any(getattr(sharding, "num_devices", 1) > 1 for sharding in told)


def on_one_device(params: PyTree) -> bool:
    """No parameter is spread over several devices."""
    return all(len(getattr(a, "devices", set)()) <= 1 for a in jax.tree.leaves(params) if isinstance(a, jax.Array))
