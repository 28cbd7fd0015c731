"""What waits in the ring is absorbed in pieces or all at once; the drafter's context must not depend on which."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cycle import DecodeState, absorb_held, init_ring
from dspark_jax.engine.slot_arrays import SlotArrays
from dspark_jax.testing import tiny_drafter, tiny_target

SLOTS, CELLS, PLACES, WIDTH = 3, 48, 24, 4


def state_of(drafter: object, target: object, length: list[int]) -> DecodeState:
    """Slots of so many tokens, a drafter that has absorbed none, a ring full of numbers."""
    rng = np.random.default_rng(0)
    ring = init_ring(target, drafter, SLOTS, PLACES)  # type: ignore[arg-type]
    ring = ring.replace(
        features=jnp.asarray(rng.standard_normal(ring.features.shape), ring.features.dtype),
        tokens=jnp.asarray(rng.integers(1, 30, ring.tokens.shape), jnp.int32),
    )
    idle = SlotArrays(1).idle()
    every = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (SLOTS, *np.shape(x))), idle)
    draft = drafter.init(SLOTS, CELLS)  # type: ignore[attr-defined]
    return every.replace(length=jnp.asarray(length, jnp.int32), draft=draft, ring=ring)


@pytest.mark.parametrize("held", [[1, 0, 0], [4, 2, 4], [5, 0, 24], [24, 24, 24], [13, 7, 20]])
@pytest.mark.parametrize("length", [[24, 24, 24], [24, 30, 44]])
def test_a_ring_absorbed_at_once_leaves_the_context_that_pieces_leave(held: list[int], length: list[int]) -> None:
    """Also where the ring would end behind the cache (a slot of 44 tokens): pieces it is then."""
    target = tiny_target(num_layers=2, max_positions=CELLS)
    drafter = tiny_drafter(target, block_size=WIDTH - 1)
    state = state_of(drafter, target, length)
    found = []
    for cells in (0, CELLS):
        cache = absorb_held(drafter, state, jnp.asarray(held, jnp.int32), width=WIDTH, cells=cells).draft.cache
        found.append([np.asarray(x) for x in (*cache.k, *cache.v)])
    changed = 0.0
    for pieces, whole in zip(*found, strict=True):
        for slot, (count, end) in enumerate(zip(held, length, strict=True)):
            np.testing.assert_allclose(whole[slot, :, :end], pieces[slot, :, :end], rtol=1e-5, atol=1e-6)
            changed += float(np.abs(whole[slot, :, end - count : end]).sum())
    assert changed > 0.0
