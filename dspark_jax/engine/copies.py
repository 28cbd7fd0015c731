"""The one program that copies cache cells: a tenant to another slot, blocks of text from a slot to the store, and
from the store to a slot. Three loops in a row, each of as many turns as the job says, so that one compilation serves
all three; whole caches are never copied.

The store is made by the same functions as the slots (``Target.init_cache``, ``Drafter.init``): it has a row for every
block in place of a slot, and ``BLOCK`` cells a row. What a drafter remembers of a slot apart from cells (the state of a
chain that waits for its partner) has no place in it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.cycle import DecodeState
from dspark_jax.engine import steps
from dspark_jax.engine.prefix_cache import BLOCK
from dspark_jax.kv_cache import KVCache
from dspark_jax.types import Array, PyTree


class Store(NamedTuple):
    """Blocks of text: what targets and drafters cache of them."""

    target: PyTree
    draft: PyTree  # None without a drafter


class Job(NamedTuple):
    """What is to be copied. All scalars int32."""

    source: Any  # slot of a tenant that moves
    to: Any  # its new slot; the same one where nobody moves
    slot: Any  # whose blocks are copied
    first: Any  # block of the slot's text at which that begins
    saved: Any  # blocks to copy into the store
    loaded: Any  # blocks to copy out of it
    rows: Any  # [M] rows of the store, by block of the text


class _Site(NamedTuple):
    """Where slots and positions lie in an array."""

    slot: int
    position: int


def job(blocks: int, *, source: int = 0, to: int = 0, slot: int = 0, first: int = 0, **given: Any) -> Job:
    """A job of nothing but what is named. ``rows``: of the blocks from ``first`` on; ``blocks``: M."""
    rows = np.zeros(blocks, np.int32)
    chosen = given.pop("rows", ())
    rows[first : first + len(chosen)] = chosen
    counts = {name: np.int32(given.get(name, 0)) for name in ("saved", "loaded")}
    return Job(np.int32(source), np.int32(to), np.int32(slot), np.int32(first), **counts, rows=rows)


def copy(
    state: DecodeState, store: Store | None, job: Job, idle: DecodeState
) -> tuple[DecodeState, Store | None, Array]:
    """Does a job. Returns the state, the store, and whether everything that was saved is finite: values that are not
    must reach nobody else (``kv_cache.storable`` keeps NaN in the keys of the one who met it)."""
    state = steps.move(state, job.source, job.to, idle)
    sound = jnp.ones((), bool)
    if store is None:
        return state, store, sound
    slots, shape = jax.tree.flatten((state.target, state.draft))
    rows, store_shape = jax.tree.flatten((store.target, store.draft))
    sites = _sites((state.target, state.draft), (store.target, store.draft))

    def save(i: Array, carry: tuple[list[Array], Array]) -> tuple[list[Array], Array]:
        new, sound = list(carry[0]), carry[1]
        at = (job.first + i).astype(jnp.int32)
        for n, site in enumerate(sites):
            if site is not None:
                block = _read(slots[n], site, job.slot, at * BLOCK)
                new[n] = _write(new[n], block, site, job.rows[at], 0)
                if jnp.issubdtype(block.dtype, jnp.inexact):
                    sound = sound & jnp.all(jnp.isfinite(block))
        return new, sound

    rows, sound = jax.lax.fori_loop(0, job.saved, save, (rows, sound))

    def load(i: Array, old: list[Array]) -> list[Array]:
        new = list(old)
        at = (job.first + i).astype(jnp.int32)
        for n, site in enumerate(sites):
            if site is not None:
                block = _read(rows[n], site, job.rows[at], 0)
                new[n] = _write(new[n], block, site, job.slot, at * BLOCK)
        return new

    slots = jax.lax.fori_loop(0, job.loaded, load, slots)
    target, draft = jax.tree.unflatten(shape, slots)
    return state.replace(target=target, draft=draft), Store(*jax.tree.unflatten(store_shape, rows)), sound


def _sites(slots: PyTree, store: PyTree) -> list[_Site | None]:
    """Of every array of the caches, in the order of ``jax.tree.leaves``; None where it has no cells."""

    def cache(node: Any) -> bool:
        return isinstance(node, KVCache)

    sites: list[_Site | None] = []
    nodes = zip(jax.tree.leaves(slots, is_leaf=cache), jax.tree.leaves(store, is_leaf=cache), strict=True)
    for node, row in nodes:
        if isinstance(node, KVCache):
            sites += [_Site(int(node.stacked), a.ndim - 2) for a in jax.tree.leaves(node)]
        else:  # slots first; the axis of cells is the one in which a row of the store is shorter
            axes = [i for i in range(1, node.ndim) if node.shape[i] != row.shape[i]]
            sites.append(_Site(0, axes[0]) if axes else None)
    return sites


def _read(cells: Array, site: _Site, slot: Array, start: Array | int) -> Array:
    """One block of one slot (or row)."""
    size = list(cells.shape)
    size[site.slot], size[site.position] = 1, BLOCK
    return jax.lax.dynamic_slice(cells, _at(cells, site, slot, start), size)


def _write(cells: Array, block: Array, site: _Site, slot: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice(cells, block, _at(cells, site, slot, start))


def _at(cells: Array, site: _Site, slot: Array, start: Array | int) -> list[Array]:
    at = [jnp.zeros((), jnp.int32)] * cells.ndim
    at[site.slot], at[site.position] = jnp.asarray(slot, jnp.int32), jnp.asarray(start, jnp.int32)
    return at
