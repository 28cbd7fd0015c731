"""The upkeep of slots, on plain arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cycle import DecodeState
from dspark_jax.engine import steps
from dspark_jax.kv_cache import KVCache
from dspark_jax.sampling import SamplingRows
from dspark_jax.verify import Commit

SLOTS, CELLS = 3, 10


def cells(seed: int, stacked: bool) -> Any:
    layers = np.random.default_rng(seed).normal(size=(2, SLOTS, 1, CELLS, 4))
    return jnp.asarray(layers) if stacked else tuple(jnp.asarray(layer) for layer in layers)


def state(length: int, stacked: bool) -> DecodeState:
    """Slot 2 is at work with ``length`` cached tokens; slot 0 is where it goes."""
    at = jnp.arange(SLOTS)
    return DecodeState(
        length=jnp.array([7, 0, length], jnp.int32),
        anchor=at,
        active=at == 2,
        seed=at.astype(jnp.uint32) + 10,
        cycle=at,
        coupled=at == 2,
        remaining=at + 5,
        stop_ids=jnp.stack([at, -at], axis=1),
        sampling=SamplingRows(at / 2, at, at / 4, at / 8),
        rule=None,
        target=KVCache(cells(0, stacked), cells(1, stacked)),
        draft=jnp.arange(SLOTS * CELLS).reshape(SLOTS, CELLS),  # a scripted drafter's
    )


def idle() -> Any:
    return jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), state(1, True).replace(target=None, draft=None))


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("length", [0, 3, 4, 9, 10])
def test_a_move_carries_the_small_arrays_and_the_valid_cells(monkeypatch: Any, length: int, stacked: bool) -> None:
    """In chunks of 4 of 10 cells: none, less than one, exactly one, and a last one that overlaps."""
    monkeypatch.setattr(steps, "MOVE_CHUNK", 4)
    before = state(length, stacked)
    after = steps.move(before, jnp.int32(2), jnp.int32(0), idle())
    small = [s.replace(target=None, draft=None) for s in (before, after)]
    for old, new, empty in zip(*map(jax.tree.leaves, (*small, idle())), strict=True):
        np.testing.assert_array_equal(new[0], old[2])
        np.testing.assert_array_equal(new[1], old[1])
        np.testing.assert_array_equal(new[2], empty)
    for old, new in zip(jax.tree.leaves(before.target), jax.tree.leaves(after.target), strict=True):
        old, new = (np.asarray(a).reshape(-1, SLOTS, 1, CELLS, 4) for a in (old, new))
        np.testing.assert_array_equal(new[:, 0, :, :length], old[:, 2, :, :length])
        np.testing.assert_array_equal(new[:, 1:], old[:, 1:])
    np.testing.assert_array_equal(after.draft[0], before.draft[2])


def test_admitting_sets_one_slot_and_leaves_the_caches() -> None:
    before = state(3, False)
    after = steps.admit(before, jnp.int32(1), idle())
    assert after.target is before.target
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[[0, 2]], np.asarray(old)[[0, 2]])
    assert not after.seed[1] and not after.remaining[1]


def test_what_is_packed_is_unpacked() -> None:
    commit = Commit(
        tokens=jnp.array([[4, 5, -1], [6, -1, -1]], jnp.int32),
        count=jnp.array([2, 1], jnp.int32),
        accepted=jnp.array([1, 0], jnp.int32),
        offered=jnp.array([2, 0], jnp.int32),
        finished=jnp.array([True, False]),
        stopped=jnp.array([False, False]),
        failed=jnp.array([False, True]),
    )
    out = steps.unpack(steps.pack(commit))
    for name, value in vars(commit).items():
        np.testing.assert_array_equal(getattr(out, name), value)
        assert getattr(out, name).dtype == value.dtype
