"""Anchors and packed blocks, worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.data.packing import BlockPlan, eligible, pack, sample_anchors

MASK = 99


def test_a_plan_lays_blocks_end_to_end() -> None:
    plan = BlockPlan.cycle(3, (2, 1))
    assert plan.widths == (2, 1, 2) and plan.slots == 5 and plan.widest == 2
    assert plan.block.tolist() == [0, 0, 1, 2, 2]
    assert plan.offset.tolist() == [0, 1, 0, 0, 1]
    own, real = plan.own
    assert own.tolist() == [[0, 1], [0, 1], [2, 2], [3, 4], [3, 4]]
    assert real.tolist() == [[True, True], [True, True], [True, False], [True, True], [True, True]]
    with pytest.raises(ValueError, match="widths"):
        BlockPlan((2, 0))


def test_an_anchor_and_its_successor_are_learnt() -> None:
    mask = jnp.array([[False, True, True, False, True], [True, True, False, False, False]])
    assert eligible(mask).tolist() == [[False, True, False, False, False], [True, False, False, False, False]]


def test_anchors_are_eligible_distinct_and_fixed_by_the_key() -> None:
    mask = jnp.arange(40)[None, :] % 10 > 2
    anchors, keep = sample_anchors(jax.random.key(3), mask, 12)
    assert keep.all() and len(set(anchors[0].tolist())) == 12
    assert eligible(mask)[0, anchors[0]].all()
    again, _ = sample_anchors(jax.random.key(3), mask, 12)
    other, _ = sample_anchors(jax.random.key(4), mask, 12)
    assert (anchors == again).all() and (anchors != other).any()
    few, keep = sample_anchors(jax.random.key(3), mask[:, :6], 4)
    assert keep.tolist() == [[True, True, False, False]] and few[0, 2:].tolist() == [0, 0]


def test_slots_by_hand() -> None:
    """Tokens 10..17, learnt from position 2 on but not at 6: a block ends before it, and at the sequence's end."""
    tokens = jnp.arange(10, 18)[None, :]
    learnt = jnp.array([[False, False, True, True, True, True, False, True]])
    plan = BlockPlan((3, 2, 2))
    keep = jnp.array([[True, True, False]])
    slots = pack(plan, jnp.array([[4, 2, 3]], jnp.int32), keep, tokens, learnt, MASK)
    assert slots.tokens.tolist() == [[14, MASK, MASK, 12, MASK, 13, MASK]]
    assert slots.position.tolist() == [[4, 5, 6, 2, 3, 3, 4]]
    assert slots.previous.tolist() == [[14, 15, 16, 12, 13, 13, 14]]
    assert slots.labels.tolist() == [[15, 16, 17, 13, 14, 14, 15]]
    assert slots.row.tolist() == [[4, 5, 6, 2, 3, 3, 4]]
    # Position 6 is no answer; what comes behind it does not count either. The third block was dropped.
    assert slots.mask.tolist() == [[True, False, False, True, True, False, False]]


def test_labels_behind_the_end_do_not_count() -> None:
    tokens = jnp.arange(4)[None, :]
    slots = pack(
        BlockPlan((3,)), jnp.array([[2]], jnp.int32), jnp.ones((1, 1), bool), tokens, jnp.ones((1, 4), bool), MASK
    )
    assert slots.mask.tolist() == [[True, False, False]]
    assert np.asarray(slots.position).tolist() == [[2, 3, 4]]
