"""``coupled``: what is emitted is, token for token, what plain decoding with the same noise emits.

Cycles are driven with noise read from a grid: at every position every token's Gumbel number is -2, 0 or 2, so that
arg-maxes of draft and target come in all 3 x 3 combinations. Each tape is decoded under every pair of admission
lengths and under rules that look at the drawn tokens, which would bias ``rejection``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.drafters.base import Proposal
from dspark_jax.logit_rule import Penalties
from dspark_jax.sampling import SamplingRows, sampling_rows
from dspark_jax.testing import GumbelTable, ScriptedDrafter, ScriptedTarget, open_slots
from dspark_jax.types import Array
from tests.law.exact import Strengths, next_token
from tests.law.worlds import LENGTHS, PROMPT, G, Setting, V, pack, penalty_state, tables

pytestmark = pytest.mark.usefixtures("x64")

TAPES = 27 * 27
HORIZON = 2 * (G + 1)

SETTINGS: dict[str, Callable[[], Setting]] = {
    "plain": lambda: Setting(*tables(20)),
    "filters": lambda: Setting(*tables(21), sampling=Sampling(temperature=1.4, top_k=2, top_p=0.9, min_p=0.02)),
    "penalties": lambda: Setting(*tables(22), strengths=Strengths(1.6, 0.3, 0.4)),
    "trimmed draft vocabulary": lambda: Setting(*tables(23, columns=2), d2t=(2, 0)),
    "permuted draft vocabulary": lambda: Setting(*tables(24), d2t=(1, 2, 0)),
}


def grid_of_tapes(seed: int) -> np.ndarray:
    """``[TAPES, positions, V]``: every position of every tape is one of the 27 patterns of -2, 0, 2."""
    rng = np.random.default_rng(seed)
    return 2.0 * rng.integers(-1, 2, size=(TAPES, len(PROMPT) + HORIZON, V))


def plain_texts(s: Setting, tapes: np.ndarray) -> np.ndarray:
    """``[TAPES, HORIZON]`` by the reference, one token at a time."""
    cache: dict[tuple[int, ...], np.ndarray] = {}
    texts = []
    for g in tapes:
        made: tuple[int, ...] = ()
        for _ in range(HORIZON):
            if made not in cache:
                with np.errstate(divide="ignore"):
                    law = next_token(s.p, s.order, PROMPT, made, s.sampling, s.strengths or Strengths())
                    cache[made] = np.log(law)
            made = (*made, int(np.argmax(cache[made] + g[len(PROMPT) + len(made)])))
        texts.append(made)
    return np.array(texts)


def token_reader(proposal: Proposal) -> Array:
    """An adversary: the length is a function of the very tokens it decides on."""
    return (proposal.tokens[:, 0] * 2 + proposal.tokens[:, 1]) % (G + 1)


def likely_tokens(proposal: Proposal) -> Array:
    """The drawn tokens' own probabilities, which ``rejection`` must never use, through the unconstrained search."""
    survival = jnp.exp(jnp.cumsum(proposal.log_q, axis=1))
    expected = 1.0 + jnp.concatenate([jnp.zeros_like(survival[:, :1]), jnp.cumsum(survival, axis=1)], axis=1)
    return jnp.argmax(expected / np.array([[1.0, 1.5, 1.6]]), axis=1).astype(jnp.int32)


ADVERSARIES = (token_reader, likely_tokens)
SCENARIOS = len(LENGTHS) + len(ADVERSARIES)


@dataclass
class Decoded:
    """Two cycles of every tape under every scenario; rows are (scenario, tape)."""

    drafts: np.ndarray  # [2, scenarios, TAPES, G]
    accepted: np.ndarray  # [2, scenarios, TAPES]
    tokens: np.ndarray  # [scenarios, TAPES, HORIZON] packed to the left
    count: np.ndarray  # [scenarios, TAPES]


@functools.partial(jax.jit, static_argnames=("strengths", "noise"))
def run(
    target: ScriptedTarget,
    drafter: ScriptedDrafter,
    values: Array,
    sampling: SamplingRows,
    strengths: Strengths | None,
    noise: type[GumbelTable],
) -> list[tuple[Array, ...]]:
    """Two cycles of every (scenario, tape): drafts, accepted, tokens, count of each."""
    rows = SCENARIOS * TAPES
    rule = None if strengths is None else Penalties()
    static = cycle.Static(noise=noise(values), rule=rule)
    state = open_slots(
        target,
        drafter,
        jnp.broadcast_to(jnp.asarray(PROMPT)[None, :], (rows, len(PROMPT))),
        max_new_tokens=100,
        seeds=jnp.tile(jnp.arange(TAPES), SCENARIOS),
        coupled=True,
        rule=rule,
        rule_state=penalty_state(strengths, rows),
    ).replace(sampling=sampling)
    scenario, out = jnp.repeat(jnp.arange(SCENARIOS), TAPES), []
    for c in range(2):
        proposal = cycle.draft(drafter, state, num_drafts=G, static=static)
        options = [jnp.full(rows, pair[c]) for pair in LENGTHS] + [look(proposal) for look in ADVERSARIES]
        admitted = jnp.choose(scenario, options, mode="clip")
        state, result = cycle.step(target, drafter, state, proposal, admitted, static=static)
        out.append((proposal.tokens, result.accepted, result.tokens, result.count))
    return out


def decode(s: Setting, tapes: np.ndarray, noise: type[GumbelTable] = GumbelTable) -> Decoded:
    """The scenarios: LENGTHS, then the two adversaries."""
    sampling = sampling_rows(s.sampling, SCENARIOS * TAPES)
    parts = run(s.target, s.drafter, jnp.asarray(tapes), sampling, s.strengths, noise)
    cycles = [[np.asarray(x) for x in part] for part in parts]
    tokens, count = pack([(c[2], c[3]) for c in cycles])
    shape = (SCENARIOS, TAPES)
    return Decoded(
        np.stack([c[0].reshape(*shape, G) for c in cycles]),
        np.stack([c[1].reshape(shape) for c in cycles]),
        tokens.reshape(*shape, HORIZON),
        count.reshape(shape),
    )


def check(s: Setting, tapes: np.ndarray) -> Decoded:
    """Whatever was emitted is the beginning of the plain text of the same tape."""
    plain, out = plain_texts(s, tapes), decode(s, tapes)
    real = np.arange(HORIZON) < out.count[..., None]
    np.testing.assert_array_equal(np.where(real, out.tokens, -1), np.where(real, plain[None], -1))
    assert (out.count[LENGTHS.index((0, 0))] == 2).all()
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_emitted_tokens_are_those_of_plain_decoding_whatever_is_admitted(name: str) -> None:
    out = check(SETTINGS[name](), grid_of_tapes(0))
    assert set(out.count[LENGTHS.index((G, G))].tolist()) >= set(range(3, HORIZON + 1))


def test_every_pair_of_arg_maxes_at_each_place_gives_the_plain_text() -> None:
    """All 3 x 3 pairs of (draft's choice, target's choice), at both places of the block.

    The pair (i, j) needs p_j / q_j > p_i / q_i, so one p and q allow (i, j) or (j, i), not both: two settings that
    mirror each other cover all nine. Every tape has one of the 27 patterns at place 0 and one at place 1.
    """
    patterns = np.array(np.meshgrid(*[[-2.0, 0.0, 2.0]] * V)).reshape(V, -1).T + np.linspace(0, 1e-6, V)
    first, second = np.repeat(np.arange(27), 27), np.tile(np.arange(27), 27)
    tapes = np.zeros((27 * 27, len(PROMPT) + HORIZON, V)) + np.linspace(0, 1e-6, V)
    tapes[:, len(PROMPT)], tapes[:, len(PROMPT) + 1] = patterns[first], patterns[second]
    rising, contexts = np.arange(3.0), (V + 1) ** 2
    found: list[set[tuple[int, int]]] = [set(), set()]
    for p, q in ((rising, rising[::-1]), (rising[::-1], rising)):
        out = check(Setting(np.tile(p, (contexts, 1)), np.tile(q, (G, contexts, 1))), tapes)
        for k in range(G):
            choice = np.argmax(p + tapes[:, len(PROMPT) + k], axis=1)  # p is the same after every token
            found[k] |= set(zip(out.drafts[0, 0, :, k].tolist(), choice.tolist(), strict=True))
    assert [len(pairs) for pairs in found] == [V * V, V * V]


def permuted(s: Setting, order: tuple[int, ...]) -> Setting:
    """The same drafter with its columns in another order."""
    return replace(s, q=s.q[:, :, list(order)], d2t=order)


def test_acceptance_with_a_permuted_draft_vocabulary_is_that_of_the_plain_one() -> None:
    """The noise belongs to the target's token id: reordering the draft's columns changes nothing at all."""
    s, tapes = SETTINGS["plain"](), grid_of_tapes(3)
    plain, other = decode(s, tapes), decode(permuted(s, (1, 2, 0)), tapes)
    np.testing.assert_array_equal(plain.drafts, other.drafts)
    np.testing.assert_array_equal(plain.accepted, other.accepted)
    np.testing.assert_array_equal(plain.tokens, other.tokens)
    assert 0 < plain.accepted[0, LENGTHS.index((G, G))].mean() < G


def test_noise_keyed_by_draft_column_would_be_caught() -> None:
    """The mistake the permutation test is for: the draft reads its numbers by column instead of by target id."""

    class ByColumn(GumbelTable):
        def categorical(self, log_probs, key, ids, greedy):  # type: ignore[no-untyped-def]
            return super().categorical(log_probs, key, None, greedy)

    s, tapes = SETTINGS["plain"](), grid_of_tapes(3)
    plain, other = decode(s, tapes), decode(permuted(s, (1, 2, 0)), tapes, ByColumn)
    full = LENGTHS.index((G, G))
    assert other.accepted[0, full].mean() < 0.8 * plain.accepted[0, full].mean()


@jax.jit
def one_cycle(target: ScriptedTarget, drafter: ScriptedDrafter, coupled: Array, temperature: Array) -> list[Array]:
    """The product's own noise; every row the same prompt, its own seed."""
    rows = coupled.shape[0]
    prompts = jnp.broadcast_to(jnp.asarray(PROMPT)[None, :], (rows, len(PROMPT)))
    state = open_slots(target, drafter, prompts, max_new_tokens=9).replace(coupled=coupled)
    state = state.replace(sampling=state.sampling.replace(temperature=temperature))
    proposal = cycle.draft(drafter, state, num_drafts=G)
    _, result = cycle.step(target, drafter, state, proposal, jnp.full(rows, G))
    return [proposal.tokens, result.tokens, result.accepted]


def test_rules_and_temperatures_mix_in_a_batch_row_by_row() -> None:
    """A request's rule is a row of data: among rows of the other rule, and greedy ones, it does what it does alone."""
    s, rows = SETTINGS["plain"](), 240
    coupled, cold = np.arange(rows) % 2 == 0, np.arange(rows) % 3 == 0

    def decoded(coupled: np.ndarray, cold: np.ndarray) -> np.ndarray:
        temperature = jnp.asarray(np.where(cold, 0.0, 0.9), jnp.float32)
        out = one_cycle(s.target, s.drafter, jnp.asarray(coupled), temperature)
        return np.concatenate([np.asarray(x).reshape(rows, -1) for x in out], axis=1)

    yes, no = np.full(rows, True), np.full(rows, False)
    mixed, alone = decoded(coupled, cold), {c: decoded(yes if c else no, no) for c in (True, False)}
    greedy = decoded(no, yes)
    np.testing.assert_array_equal(greedy, decoded(yes, yes))  # at temperature 0 both rules are one
    for row in range(rows):
        expected = greedy if cold[row] else alone[bool(coupled[row])]
        np.testing.assert_array_equal(mixed[row], expected[row])
    assert (alone[True] != alone[False]).any(axis=1).mean() > 0.5
