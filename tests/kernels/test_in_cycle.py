"""The decoding cycle through the kernels: the same drafts, verdicts and failures as the plain way."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, cycle
from dspark_jax.cycle import DecodeState, Static
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.logit_rule import Penalties
from dspark_jax.targets import Target
from dspark_jax.testing import open_slots, tiny_drafter, tiny_target
from pallas_kernels.dispatch import BackendError
from tests.kernels import interpreters

ROWS, DRAFTS, CYCLES, RANK = 8, 3, 3, 128
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8)


@functools.cache
def models(head: str = "vanilla", trimmed: bool = True) -> tuple[Target, Drafter]:
    """Rank 128 and 8 rows, as a TPU kernel wants them."""
    target = tiny_target(vocab_size=48, hidden_size=RANK, num_layers=2)
    return target, tiny_drafter(target, head=head, block_size=DRAFTS, draft_vocab_size=32 if trimmed else 0)


@functools.cache
def opened(filtered: bool = False) -> DecodeState:
    """Greedy, ``coupled`` and ``rejection`` rows side by side, before their first cycle."""
    target, drafter = models()
    sampling = [GREEDY if row % 4 == 0 else WARM for row in range(ROWS)]
    if filtered:
        sampling[-1] = Sampling(top_p=0.7)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 47, (ROWS, 3)), jnp.int32)
    state = open_slots(target, drafter, prompts, max_new_tokens=20, sampling=sampling)
    return state.replace(coupled=jnp.arange(ROWS) % 2 == 0)


@functools.partial(jax.jit, static_argnames="static")
def one_cycle(target: Target, drafter: Drafter, state: DecodeState, static: Static) -> tuple[DecodeState, Any]:
    proposal = cycle.draft(drafter, state, num_drafts=DRAFTS, static=static)
    admitted = jnp.asarray([3, 3, 2, 3, 1, 2, 3, 0])
    state, result = cycle.step(target, drafter, state, proposal, admitted, static=static)
    return state, (proposal.tokens, result, proposal.log_q, proposal.confidence_logits)


def run(target: Target, drafter: Drafter, state: DecodeState, static: Static) -> list[Any]:
    """What ``CYCLES`` cycles drafted, how sure they were, and what they committed."""
    out = []
    for _ in range(CYCLES):
        state, seen = one_cycle(target, drafter, state, static)
        out.append(seen)
    return out


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Integers exactly. Log-probabilities to 1e-5: sums in another order."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 if jnp.issubdtype(x.dtype, jnp.floating) else 0, rtol=0)


@pytest.mark.parametrize(
    ("head", "trimmed"),
    [("vanilla", True), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("gated", False), ("rnn", True)))],
)
def test_fused_cycles_are_the_plain_cycles(head: str, trimmed: bool) -> None:
    """Both rules and temperature 0 in one batch, admissions from 0 to all. Rows of every rule accept and reject."""
    target, drafter = models(head, trimmed)
    plain = run(target, drafter, opened(), Static())
    assert_same(run(target, drafter, opened(), Static(fused="xla")), plain)
    accepted = np.stack([np.asarray(result.accepted) for _, result, _, _ in plain])
    for rows in (slice(0, None, 4), slice(2, None, 4), slice(1, None, 2)):
        assert accepted[:, rows].any() and not accepted[:, rows].all()


def test_cycles_through_tpu_kernels_are_the_plain_cycles() -> None:
    """Interpreted; one program, so both passes over the vocabulary and the confidence come from the kernels."""
    static = Static(fused="tpu", interpret=interpreters.tpu())
    assert_same(run(*models(), opened(), static), run(*models(), opened(), Static()))


def test_a_filtered_row_sends_its_batch_the_plain_way() -> None:
    """Kernels apply no filter. Its row is the only difference between the batches, and the others' text stays."""
    both = [run(*models(), opened(True), Static(fused=fused)) for fused in (None, "xla")]
    assert_same(*both)
    others = run(*models(), opened(), Static())
    for (_, a, _, _), (_, b, _, _) in zip(both[1], others, strict=True):
        np.testing.assert_array_equal(a.tokens[:-1], b.tokens[:-1])


def test_logits_that_are_no_numbers_end_a_row_the_fused_way_too() -> None:
    """The row's own hidden states are NaN from the first cycle on; its neighbours notice nothing."""
    target, drafter = models()
    state = opened()
    broken = state.replace(anchor=state.anchor.at[1].set(47))
    sick = target.replace(params={**target.params, "embed_tokens": target.params["embed_tokens"].at[47].set(jnp.nan)})
    plain, fused = (run(sick, drafter, broken, Static(fused=fused)) for fused in (None, "xla"))
    for (_, a, _, _), (_, b, _, _) in zip(plain, fused, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
    assert np.asarray(fused[0][1].failed).tolist() == [row == 1 for row in range(ROWS)]


def test_naming_a_backend_means_that_one_or_an_error_with_the_reason() -> None:
    """Nothing is computed: the cycle is only traced."""
    target, drafter = models()

    def traced(drafter: Drafter, **static: Any) -> Any:
        return jax.eval_shape(functools.partial(one_cycle, static=Static(**static)), target, drafter, opened())

    with pytest.raises(BackendError, match="needs a hopper device"):
        bf16 = jax.tree.map(lambda a: a.astype(jnp.bfloat16), drafter.params)
        traced(drafter.replace(params=bf16), fused="mosaic_gpu")
    with pytest.raises(BackendError, match="spread over several devices"):
        traced(drafter.replace(spread=True), fused="tpu", interpret=interpreters.tpu())
    with pytest.raises(BackendError, match="logit rule"):
        traced(drafter, fused="xla", rule=Penalties())
