"""Where the engine's state lives: one device, or the mesh of the target's weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.cycle import DecodeState, TargetModel
from dspark_jax.drafters.base import DrafterModel
from dspark_jax.kv_cache import KVCache
from dspark_jax.sharding import mesh_of, spread, tracing_on
from dspark_jax.types import Array, PyTree


class Placement:
    """Where the state lives: the default device, or the mesh of the target's weights. There caches are cut along their
    key/value heads as the weights are (mesh axis ``model``) and along their slots (``data``); nearly everything else
    is on every device."""

    def __init__(self, target: TargetModel, drafter: DrafterModel | None = None) -> None:
        self._mesh: Any = mesh_of(target)
        shared = getattr(drafter, "shared", None)
        self._draft_vocab = None if shared is None else shared.head.shape[0]

    def tracing(self) -> AbstractContextManager[Any]:
        """The context in which programs are traced."""
        return tracing_on(self._mesh)

    def put(self, tree: PyTree) -> PyTree:
        """The tree on the device(s)."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        return jax.tree.map(spread, tree, self._shardings(tree))

    def shapes(self, tree: PyTree) -> PyTree:
        """The tree as shapes, on the device(s) where ``put`` would have it."""
        if self._mesh is None:
            return tree
        place = self._shardings(tree)
        return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), tree, place)

    def numbers(self, arguments: PyTree) -> PyTree:
        """Arguments for lowering: those from the host are on every device, which a compiler may not change."""
        if self._mesh is None:
            return arguments
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def shape(a: Any) -> Any:
            if isinstance(a, jax.Array | jax.ShapeDtypeStruct):
                return a
            return jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype, sharding=everywhere)

        return jax.tree.map(shape, arguments)

    def out_shardings(self, kind: str, state: DecodeState, result: Callable[[], PyTree]) -> dict[str, Any]:
        """Options for ``jax.jit`` that keep the state where it is: the next program is compiled for that. ``result()``:
        shapes of what the program returns."""
        if self._mesh is None:
            return {}
        if kind in ("draft", "copy"):
            return {"out_shardings": self._shardings(result())}
        own = self._shardings(state)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return {"out_shardings": own if kind in ("admit", "absorb") else (own, everywhere)}

    def _shardings(self, tree: PyTree) -> PyTree:
        """Caches are cut along their slots and their heads, rows of width Vd along the vocabulary, where the mesh
        divides them."""
        mesh = self._mesh

        def cut(a: Array, **axes: int) -> NamedSharding:
            """``mesh axis = axis of the array``, counted from the end."""
            names: list[str | None] = [None] * a.ndim
            for name, axis in axes.items():
                if name in mesh.axis_names and a.shape[axis] % mesh.shape[name] == 0:
                    names[axis] = name
            return NamedSharding(mesh, PartitionSpec(*names))

        def place(part: PyTree) -> PyTree:
            if isinstance(part, KVCache):
                return jax.tree.map(lambda a: cut(a, data=-4, model=-3), part)
            if part.ndim == 3 and part.shape[-1] == self._draft_vocab:
                return cut(part, model=-1)
            return NamedSharding(mesh, PartitionSpec())

        return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, KVCache))
