"""A least gain and a floor under each request's speed bias nothing, because they are taken from old scores too.

As in ``test_scheduling.py``: two letters, everything enumerated, p = (0.7, 0.3), q = (0.5, 0.5). Each claim has a twin
in which the condition looks at the block it decides about; that one is biased by the number written beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.engine import EngineConfig
from dspark_jax.engine.adaptive import Lagged
from dspark_jax.engine.estimates import Score
from dspark_jax.engine.policy import Beside, Policy, Threshold
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import Tenant
from dspark_jax.schedule import StepTimeTable, admit_threshold, admit_top_k
from dspark_jax.schedule.choice import choose
from dspark_jax.testing import open_slots
from tests.law.keyed import KeyedTape, by_key, enumerate_keyed
from tests.law.test_scheduling import (
    EXACT,
    FIRST,
    LETTERS,
    first_letters,
    lagged_capacities,
    one_cycle,
    scripted,
    survivals,
    three_cycles,
    without_the_second_block,
)

CHEAP = StepTimeTable(tokens=[1, 2, 3, 4, 5], milliseconds=[1.0, *[1 / 0.54] * 4])
"""Verifying four drafts pays whenever their survivals sum to more than 0.85, which they always do here; it doubles the
tokens per millisecond only where they sum to more than 2.70."""

TWICE = EngineConfig(min_gain=1.0)


# ---- the least gain ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_least_gain_from_old_scores_does_not_bias(x64: None) -> None:
    """The third cycle verifies four drafts or none: four where the first one's block began with three first letters (a
    sum of 2.97), none otherwise (at most 2.50). That is the gain's doing: without it all are verified."""
    always = np.array([[0.8, 0.24, 0.072, 0.0216], [0.8, 0.76, 0.722, 0.6859]])
    assert lagged_capacities(always, CHEAP).tolist() == [4, 4]
    capacities = partial(lagged_capacities, table=CHEAP, config=TWICE)
    assert capacities(always).tolist() == [0, 4]
    error, marginals = three_cycles(without_the_second_block(by_key), (4 + 1) + 1 + (4 + 4 + 1), capacities)
    assert error <= EXACT
    np.testing.assert_allclose(marginals, 0.7, rtol=0, atol=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.6, 0.3])
def test_old_scores_that_have_regressed_do_not_bias(slope: float, x64: None) -> None:
    """As the test above, with a slope learned before: four drafts behind three first letters and none otherwise (their
    sum of 2.97, or of 2.50 at most, is moved towards the average's 2.4; they pay from 2.6 on), or none at all."""
    table = StepTimeTable(tokens=[1, 2, 3, 4, 5], milliseconds=[1.0, *[3.6] * 4])

    def capacities(old: np.ndarray) -> np.ndarray:
        def regressed(policy: Lagged) -> None:
            policy._estimates._slope._both *= slope

        return lagged_capacities(old, table, prepare=regressed)

    rows = np.array([[0.8, 0.24, 0.072, 0.0216], [0.8, 0.76, 0.722, 0.217], [0.8, 0.76, 0.722, 0.6859]])
    assert capacities(rows).tolist() == ([0, 0, 4] if slope == 0.6 else [0, 0, 0])
    error, marginals = three_cycles(without_the_second_block(by_key), (4 + 1) + 1 + (4 + 4 + 1), capacities)
    assert error <= EXACT
    np.testing.assert_allclose(marginals, 0.7, rtol=0, atol=EXACT)


def test_a_least_gain_from_the_block_s_own_scores_biases(x64: None) -> None:
    """Survivals (0.8, 0.72) behind the first letter and (0.8, 0) behind the second; two drafts by old scores, but only
    if they gain 0.9 by the block's own: 2.52 / 1.25 = 2.02 does, 1.8 / 1.25 = 1.44 does not. The first letter is always
    accepted, without a draft it has 0.7: 0.5 + 0.5 * 0.7 = 0.85."""
    table = StepTimeTable(tokens=[1, 3], milliseconds=[1.0, 1.25])
    models = scripted(lambda k, tokens: 0.8 if k == 0 else (0.9, 0.0, 0.0)[tokens[-1]], 2)

    def by_old(proposal: Any) -> Any:
        return jnp.full(proposal.tokens.shape[0], 2, jnp.int32)

    def by_own(proposal: Any) -> Any:
        rows = np.asarray(survivals(proposal))
        return jnp.asarray([choose(row[None], table, min_gain=0.9).drafts for row in rows], jnp.int32)

    assert one_cycle(by_old, models) == pytest.approx(0.7, abs=EXACT)
    assert one_cycle(by_own, models) == pytest.approx(0.85, abs=EXACT)


# ---- the floor under a request's speed ---------------------------------------------------------------------------

FLOOR = 1.1  # tokens per millisecond: 1100 tokens/s/user

SHARED = StepTimeTable(tokens=[4, 5, 6], milliseconds=[1.0, 2.0, 2.1])
"""Of two requests. B's drafts survive with 0.99 and 0.98, A's with 0.8 and then 0.72 behind the first letter, 0 behind
the second. Two drafts, both B's, are best for all (3.97 / 1 against at most 5.49 / 2.1), but leave A with 1 token a
millisecond. Four give it 2.52 / 2.1 = 1.2, if there are four; else nothing keeps the floor, and A is served best by
none of its own (1.8 / 2 = 0.9)."""

A, B = [[0.8, 0.72], [0.8, 0.0]], [0.99, 0.9801]


def by_floor(rows: np.ndarray) -> int:
    return choose(rows, SHARED, floor_per_ms=FLOOR).drafts


def shared_cycle(lengths: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """P(first letter) of each request's first letter; ``lengths [2]`` by the block's own survivals ``[2, 2]``."""

    def confidence(k: int, tokens: tuple[int, ...]) -> float:
        if k == 0:
            return 0.8 if tokens[-1] == 0 else 0.99
        anchor, drafted = tokens
        return 0.99 if anchor == 1 else (0.9 if drafted == FIRST else 0.0)

    target, drafter = scripted(confidence, 2, order=2)

    def run(tape: KeyedTape) -> np.ndarray:
        prompts = jnp.tile(jnp.asarray([[0], [1]], jnp.int32), (tape.worlds, 1))
        seeds = jnp.tile(jnp.asarray([3, 5], jnp.uint32), tape.worlds)
        state = open_slots(target, drafter, prompts, max_new_tokens=99, seeds=seeds)
        static = cycle.Static(noise=tape)
        proposal = cycle.draft(drafter, state, num_drafts=2, static=static)
        known, which = np.unique(np.asarray(survivals(proposal)).reshape(-1, 4), axis=0, return_inverse=True)
        found = [lengths(rows.reshape(2, 2)) for rows in known]
        admitted = jnp.asarray(np.stack(found)[which.reshape(-1)].reshape(-1), jnp.int32)
        _, result = cycle.step(target, drafter, state, proposal, admitted, static=static)
        return np.asarray(result.tokens)

    tape, tokens = enumerate_keyed(run, (LETTERS, LETTERS), 10, at_least=2**10)
    return first_letters(tape, tokens, 2)


def test_a_floor_from_old_scores_does_not_bias(x64: None) -> None:
    """Whatever the old scores said, it was said before."""
    wanted = [by_floor(np.array([a, B])) for a in A]
    assert wanted == [4, 2] and [choose(np.array([a, B]), SHARED).drafts for a in A] == [2, 2]
    for old in wanted:
        assert shared_cycle(lambda rows, old=old: admit_top_k(rows, old)) == pytest.approx([0.7, 0.7], abs=EXACT)


def test_a_floor_from_the_block_s_own_scores_biases(x64: None) -> None:
    """A is verified only behind the first letter: 0.5 + 0.5 * 0.7 = 0.85."""
    found = shared_cycle(lambda rows: admit_top_k(rows, by_floor(rows)))
    assert found == pytest.approx([0.85, 0.7], abs=EXACT)


# ---- the budget of tokens at fixed length and by a threshold -----------------------------------------------------


@pytest.mark.parametrize("policy", [Policy, Threshold])
def test_blocks_that_are_shortened_to_a_step_s_room_do_not_bias(policy: type[Policy], x64: None) -> None:
    """From room for nothing but the requests to room for whole blocks: shares go by count, and a threshold of 0.5 cuts
    A's second draft only behind the second letter, as it may (Algorithm 1 is no more causal). 0.7 everywhere."""

    def lengths(rows: np.ndarray, room: int) -> np.ndarray:
        most = policy(2).decide(0, [object()] * 2, None, Beside(room=room)).most  # type: ignore[list-item]
        assert most is not None and most.sum() == min(room - 2, 4)
        conditional = rows / np.concatenate([np.ones((2, 1)), rows[:, :1]], axis=1)
        return np.minimum(admit_threshold(conditional, 0.5), most) if policy is Threshold else most

    for room in range(2, 7):
        assert shared_cycle(partial(lengths, room=room)) == pytest.approx([0.7, 0.7], abs=EXACT)


def test_a_share_by_the_block_s_own_scores_biases(x64: None) -> None:
    """Room for one draft of A, given to it only where its block sums to more than 1: behind the first letter, which is
    then accepted. 0.5 + 0.5 * 0.7 = 0.85."""
    found = shared_cycle(lambda rows: np.array([int(rows[0].sum() > 1.0), 2]))
    assert found == pytest.approx([0.85, 0.7], abs=EXACT)


# ---- which scores the policy takes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "table", "other_ms", "drafts"),
    [
        (EngineConfig(), SHARED, 0.0, (2, 2)),
        (EngineConfig(), SHARED, 9.0, (2, 2)),
        (EngineConfig(speed_floor=1e3 * FLOOR), SHARED, 0.0, (4, 2)),
        (EngineConfig(speed_floor=1e3 * FLOOR / 2), SHARED, 0.0, (2, 2)),
        (EngineConfig(speed_floor=1e3 * FLOOR / 2), SHARED, 1.0, (4, 3)),
        (EngineConfig(min_gain=1.0), StepTimeTable(tokens=[2, 6], milliseconds=[1.0, 1.31]), 0.0, (4, 0)),
    ],
    ids=["neither", "neither, a prompt", "floor", "half of it", "half of it, a prompt", "gain"],
)
def test_conditions_are_taken_from_the_scores_that_chose_the_capacity(
    config: EngineConfig, table: StepTimeTable, other_ms: float, drafts: tuple[int, int]
) -> None:
    """Those two cycles old: the newer ones would choose otherwise, and are not looked at. A gain of 1: all drafts give
    5.49 / 1.31 = 4.19 > 2 * 2 / 1, or 4.77 / 1.31 = 3.64 which is too little. A piece of a prompt in the step, known
    before its drafts: half of the floor is kept by two drafts (1 / 1); with 1 ms beside them by three (1.8 / 3) and by
    four (2.52 / 3.1), which are better where there are four."""
    for old, wanted in enumerate(drafts):
        policy = Lagged(2, config)
        tenants = [Tenant(n, Checked((0,), 9, Sampling(), None, False, ()), n) for n in range(2)]
        for n, scores in enumerate((A[old], A[1 - old], A[1 - old])):
            rows = zip(tenants, (scores, B), strict=True)
            policy.observe(n, [Score(tenant, np.array(row), 0, 0) for tenant, row in rows])
        assert policy.decide(2, tenants, lambda drafting: (table, 0.0), Beside(other_ms=other_ms)).drafts == wanted
        # The same policy one cycle later knows the others.
        assert (
            policy.decide(3, tenants, lambda drafting: (table, 0.0), Beside(other_ms=other_ms)).drafts
            == drafts[1 - old]
        )
