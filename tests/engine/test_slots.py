"""Who sits where, and which seeds requests hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise
from dspark_jax.config import Sampling
from dspark_jax.engine.request import Checked
from dspark_jax.engine.seeds import Seeds, claim_seed
from dspark_jax.engine.slot_arrays import SlotArrays
from dspark_jax.engine.slots import Slots, Tenant
from dspark_jax.noise import distinct_seeds
from dspark_jax.sampling import sampling_row


def tenant(number: int, *, decoding: bool = True, limit: int = 10) -> Tenant:
    return Tenant(number, Checked((1, 2, 3), limit, Sampling(), None, False, ()), number, decoding=decoding)


def bucket(slots: int) -> int:
    return next(size for size in (1, 2, 4, 8) if size >= slots)


def filled(count: int) -> tuple[Slots, list[Tenant]]:
    slots, tenants = Slots(8), [tenant(i) for i in range(count)]
    assert [slots.take(t) for t in tenants] == list(range(count))
    return slots, tenants


def test_the_lowest_free_slot_is_given() -> None:
    slots, tenants = filled(8)
    assert slots.take(tenant(9)) is None
    slots.release(tenants[5])
    slots.release(tenants[2])
    assert slots.take(tenant(10)) == 2 and slots.take(tenant(11)) == 5
    with pytest.raises(RuntimeError, match="holds no slot"):
        slots.release(tenants[2])


def test_a_move_happens_only_where_it_makes_the_bucket_smaller() -> None:
    slots, tenants = filled(4)
    slots.release(tenants[1])
    assert slots.compaction(bucket) is None  # 3 of 4: the same bucket with the hole
    slots.release(tenants[0])
    assert slots.compaction(bucket) == (3, 0) and tenants[3].slot == 0
    assert slots.compaction(bucket) == (2, 1) and tenants[2].slot == 1
    assert slots.compaction(bucket) is None
    assert slots.rows(2) == (tenants[3], tenants[2]) and len(slots) == 2


@pytest.mark.parametrize(("idle", "draws"), [(None, 0), (1.0, 1)])
def test_idle_slots_have_temperature_0_so_that_greedy_batches_draw_no_noise(
    idle: float | None, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three greedy requests and an idle slot. The condition that skips noise asks all rows, so an idle slot at
    temperature 1 would have it made for everybody; the choices are the same (tests/law/test_layouts.py: at
    temperatures > 0 as well, whatever the idle slot's is)."""
    made: list[int] = []
    gumbel = noise.gumbel

    def watched(bits: Any, dtype: Any) -> Any:
        jax.debug.callback(lambda: made.append(1))
        return gumbel(bits, dtype)

    monkeypatch.setattr(noise, "gumbel", watched)
    own = SlotArrays(1).idle().sampling
    padding = own if idle is None else own.replace(temperature=np.float32(idle))
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[sampling_row(Sampling(0.0))] * 3, padding)
    logits = jax.random.normal(jax.random.key(0), (4, 8))
    key = noise.NoiseKey(jnp.arange(4, dtype=jnp.uint32), *(jnp.zeros(4, jnp.int32) for _ in range(3)))
    draw = jax.jit(lambda x, rows: noise.HashNoise().categorical(x, key, None, rows.greedy))
    drawn = draw(logits, rows)
    jax.effects_barrier()
    assert len(made) == draws
    np.testing.assert_array_equal(drawn[:3], jnp.argmax(logits, axis=1)[:3])


def test_those_who_do_not_decode_are_left_where_they_are() -> None:
    """One in the middle of its prompt, one that is sure to be finished already."""
    slots, tenants = filled(3)
    tenants[0].decoding = False
    tenants[1].promised = 10
    assert slots.compaction(bucket) is None
    slots.release(tenants[1])
    assert slots.compaction(bucket) == (2, 1)


def test_the_length_is_never_underestimated() -> None:
    """Prompt 3, limit 10: the anchor of the last token is not cached, so at most 12 cells."""
    t = tenant(0)
    assert t.length_bound(5) == 3
    t.promised = 1
    assert t.length_bound(5) == 8
    t.tokens, t.promised = [1] * 4, 1
    assert t.length_bound(5) == 11
    t.promised = 2
    assert t.length_bound(5) == 12
    assert t.may_emit
    t.promised = 6
    assert not t.may_emit


def test_equal_seeds_are_told_apart_as_on_the_device() -> None:
    """claim_seed gives what ``noise.distinct_seeds`` gives to the rows of a batch."""
    seeds = np.array([5, 7, 5, 5, 2**32 - 1, 7, 2**32 - 1], np.uint32)
    taken: list[int] = []
    for seed in seeds:
        taken.append(claim_seed(int(seed), set(taken)))
    assert taken == np.asarray(distinct_seeds(jnp.asarray(seeds))).tolist()
    assert len(set(taken)) == len(seeds)


def test_a_free_seed_is_kept_and_the_smallest_number_is_used_again() -> None:
    second = claim_seed(5, {5})
    assert claim_seed(5, set()) == 5 and claim_seed(5, {second}) == 5
    assert claim_seed(5, {5, second}) != second


def test_an_ended_request_s_numbers_stay_taken_while_somebody_runs_who_ran_beside_it() -> None:
    """What the first one accepted has moved the second one's share of the drafts; a third one with the first one's
    numbers would compete against what they have already done."""
    seeds = Seeds()
    second = claim_seed(5, {5})
    assert [seeds.claim(1, 5), seeds.claim(2, 5)] == [5, second]
    seeds.release(1)
    assert seeds.claim(3, 5) not in (5, second)
    seeds.release(2)  # the only one that ran beside the first
    assert seeds.claim(4, 5) == 5
    seeds.release(3)
    seeds.release(4)
    seeds.release(99)  # never claimed anything
    assert (seeds._alive, seeds._ended) == ({}, []) and seeds.claim(5, 5) == 5


def test_a_tenant_that_leaves_keeps_what_it_emitted_and_nothing_a_policy_learned() -> None:
    """What a slot caches of it when it comes back, and the cycle number it goes on with."""
    t = tenant(0)
    t.tokens, t.committed, t.offered, t.prefilled, t.held, t.whole, t.low = [7, 8, 9], [1, 1], [0, 0], 3, 2, 4, 5
    t.score, t.acceptances, t.left, t.trimmed = (1, np.ones(2)), np.ones((2, 2)), object(), [(1, [2])]
    t.leave()
    assert (t.tokens, t.committed, t.text, t.known, t.cycle) == ([7, 8, 9], [1, 1], (1, 2, 3, 7, 8), 5, 3)
    assert (t.prefilled, t.decoding, t.held, t.whole, t.low, t.trimmed) == (0, False, 0, 0, 0, [])
    assert t.score is t.acceptances is t.left is None
