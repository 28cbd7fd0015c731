"""Where the engine's state lives: one device, or the mesh of the target's weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.cycle import DecodeState, TargetModel
from dspark_jax.kv_cache import KVCache
from dspark_jax.types import Array, PyTree


class Placement:
    """Where the state lives: the default device, or the mesh of the target's weights (caches cut along their
    key/value heads as the weights are, everything else on every device)."""

    def __init__(self, target: TargetModel) -> None:
        shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(target))
        spread = [s for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1]
        self._mesh: Any = spread[0].mesh if spread else None

    def put(self, tree: PyTree) -> PyTree:
        """The tree on the device(s)."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        return jax.tree.map(jax.device_put, tree, self._shardings(tree))

    def out_shardings(self, kind: str, state: DecodeState, store: PyTree = None) -> dict[str, Any]:
        """Options for ``jax.jit`` that keep the state where it is: the next program is compiled for that. ``store``:
        what a copy takes besides it."""
        if self._mesh is None:
            return {}
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        if kind == "draft":
            return {"out_shardings": everywhere}
        own = self._shardings(state)
        if kind == "copy":
            return {"out_shardings": (own, self._shardings(store), everywhere)}
        return {"out_shardings": own if kind in ("admit", "absorb") else (own, everywhere)}

    def _shardings(self, tree: PyTree) -> PyTree:
        mesh = self._mesh
        everywhere = NamedSharding(mesh, PartitionSpec())

        def cache(part: PyTree) -> PyTree:
            if not isinstance(part, KVCache) or "model" not in mesh.axis_names:
                return jax.tree.map(lambda a: everywhere, part)

            def cells(a: Array) -> NamedSharding:
                heads = a.shape[-3]
                cut = heads % mesh.shape["model"] == 0
                return NamedSharding(mesh, PartitionSpec(*[None] * (a.ndim - 3), "model" if cut else None))

            return jax.tree.map(cells, part)

        return jax.tree.map(cache, tree, is_leaf=lambda x: isinstance(x, KVCache))
