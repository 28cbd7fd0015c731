"""The law of the emitted tokens under ``rejection``, enumerated over every draft, accept and residual branch.

Vocabulary 3, block 2, two consecutive cycles, every pair of admission lengths 0..2 and a rule that reads a causal
confidence. p and q are tables of the last two tokens, so a wrong cache length or a wrong row shows. What was emitted
is completed by the target's own law to texts of 6 tokens; the law of those must be the target's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cycle, cycle_draws, verify
from dspark_jax.config import Sampling
from dspark_jax.drafters.base import Proposal
from dspark_jax.logit_rule import Penalties
from dspark_jax.testing import Tape, enumerate_worlds, open_slots
from dspark_jax.types import Array
from tests.law.exact import Strengths, distribution, next_token
from tests.law.worlds import (
    LARGEST,
    LENGTHS,
    PROMPT,
    RULED,
    G,
    Outcome,
    Setting,
    V,
    above_half,
    enumerate_two_cycles,
    errors,
    every_length_or,
    law_errors,
    tables,
)

pytestmark = pytest.mark.usefixtures("x64")

EXACT = 1e-12
PENALTIES = Strengths(repetition=1.7, frequency=0.4, presence=0.5)


def confidence(seed: int, order: int = 2) -> np.ndarray:
    """Logits ``[G, contexts]``: about half of them below 0, so that the threshold 1/2 really cuts."""
    return np.random.default_rng(100 + seed).normal(size=(G, (V + 1) ** order))


def setting(seed: int, **options: object) -> Setting:
    columns = len(options.get("d2t") or range(V))  # type: ignore[arg-type]
    p, q = tables(seed, columns=columns)
    return Setting(p, q, confidence=confidence(seed), **options)  # type: ignore[arg-type]


def with_forbidden_tokens(seed: int) -> Setting:
    """In some contexts the target never writes the token that the draft likes."""
    s = setting(seed)
    p = s.p.copy()
    p[np.arange(p.shape[0]) % 2 == 0, 1] = -np.inf
    return replace(s, p=p)


SETTINGS: dict[str, Callable[[], Setting]] = {
    "plain": lambda: setting(0),
    "top-k": lambda: setting(1, sampling=Sampling(temperature=0.8, top_k=2)),
    "top-p": lambda: setting(2, sampling=Sampling(temperature=1.3, top_p=0.7)),
    "min-p": lambda: setting(3, sampling=Sampling(min_p=0.3)),
    "all filters": lambda: setting(4, sampling=Sampling(temperature=1.5, top_k=2, top_p=0.9, min_p=0.05)),
    "penalties": lambda: setting(5, strengths=PENALTIES),
    "penalties and filters": lambda: setting(6, strengths=PENALTIES, sampling=Sampling(0.9, top_p=0.8)),
    "trimmed draft vocabulary": lambda: setting(7, d2t=(2, 0)),
    "permuted draft vocabulary": lambda: setting(8, d2t=(2, 0, 1)),
    "trimmed, penalties and min-p": lambda: setting(9, d2t=(0, 1), strengths=PENALTIES, sampling=Sampling(min_p=0.4)),
    "tokens forbidden by the target": lambda: with_forbidden_tokens(10),
}


@functools.cache
def enumerated(name: str) -> tuple[Setting, Tape, Outcome]:
    """All worlds of a setting, shared by the tests below."""
    s = SETTINGS[name]()
    return s, *enumerate_two_cycles(s, every_length_or(above_half))


@pytest.mark.parametrize("name", SETTINGS)
def test_emitted_tokens_have_the_targets_law_whatever_is_admitted(name: str) -> None:
    found = law_errors(*enumerated(name))
    assert found.shape == ((G + 1) ** 2 + 1,)
    assert found.max() <= EXACT


def test_a_draw_from_p_instead_of_the_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test sees the classic mistake, exactly where something can be rejected."""

    def from_p(log_p, layout, drafts, admitted, accepted, keys, noise):  # type: ignore[no-untyped-def]
        row = log_p[layout.index[jnp.arange(accepted.shape[0]), accepted]]
        key = verify.cycle_key(keys, accepted, verify.RESIDUAL)
        return noise.categorical(row, key, None, keys.greedy)

    monkeypatch.setattr(verify, "_residual_draw", from_p)
    found = errors(setting(0), every_length_or(above_half))
    nothing = LENGTHS.index((0, 0))
    assert found[nothing] <= EXACT
    assert (np.delete(found, nothing) > 1e-3).all()


def test_a_residual_without_d2t_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """q read as if the draft's columns were target ids."""

    def unmapped(drafter, view, proposal, vocab, static):  # type: ignore[no-untyped-def]
        return lambda place: cycle_draws.draft_law(drafter, view, proposal, place, static)

    monkeypatch.setattr(cycle_draws, "_q_row", unmapped)
    assert errors(setting(8, d2t=(2, 0, 1)), every_length_or(above_half)).max() > 1e-3


def test_dropping_a_forbidden_draft_instead_of_rejecting_it_is_caught() -> None:
    """A grammar that cuts the block before a forbidden token and draws from p is biased: the residual is due.

    The "rule" of the last scenario looks at the drawn tokens: a token the target cannot write is never offered.
    """
    p, q = tables(11, order=1)
    p[np.arange(p.shape[0]) % 2 == 0, 1] = -np.inf
    allowed = np.full((V + 1, V + 1), 10.0)  # by (token before, token)
    allowed[:, :V][np.isneginf(p)] = -10.0
    _, q = tables(11)
    dropping = Setting(p, q, order=1, confidence=np.stack([allowed.reshape(-1)] * G), peek=True)
    found = errors(dropping, every_length_or(above_half))
    assert found[:RULED].max() <= EXACT
    assert found[RULED] > 1e-3


def test_the_probability_of_the_drawn_token_is_no_confidence() -> None:
    """DESIGN section 2, idea 5: an estimate at k that depends on x_k biases ``rejection``."""
    s = setting(12)
    q = np.exp(s.q - s.q.max(axis=-1, keepdims=True))
    q /= q.sum(axis=-1, keepdims=True)  # [G, (V + 1) ** 2, V] by the two tokens before
    drawn = np.zeros((G, V + 1, V + 1, V + 1))  # by the three last tokens, the drawn one included
    drawn[:, :, :, :V] = np.log(q / (1 - q)).reshape(G, V + 1, V + 1, V)
    wider = np.broadcast_to(s.q[:, None], (G, V + 1, *s.q.shape[1:])).reshape(G, -1, V)
    peeking = replace(s, q=wider, draft_order=3, confidence=drawn.reshape(G, -1), peek=True)
    found = errors(peeking, every_length_or(above_half))
    assert found[:RULED].max() <= EXACT
    assert found[RULED] > 1e-3


def test_the_unconstrained_search_on_the_current_block_is_biased_and_caught() -> None:
    """Paper, Appendix A: choosing the best length of all, from the current block's own confidences, looks ahead.

    Confidence at place 1 depends on the token drawn at place 0, and the search decides on place 0 with it.
    """
    milliseconds = np.array([1.0, 1.0, 1.7, 1.8])  # by tokens; the second draft is nearly free

    def best(proposal: Proposal) -> Array:
        survival = jnp.cumprod(1 / (1 + jnp.exp(-proposal.confidence_logits)), axis=1)
        expected = 1.0 + jnp.concatenate([jnp.zeros_like(survival[:, :1]), jnp.cumsum(survival, axis=1)], axis=1)
        return jnp.argmax(expected / milliseconds[None, 1:], axis=1).astype(jnp.int32)

    found = errors(setting(13), every_length_or(best))
    assert found[:RULED].max() <= EXACT
    assert found[RULED] > 1e-3


@pytest.mark.parametrize("name", ["plain", "all filters", "permuted draft vocabulary", "trimmed draft vocabulary"])
def test_acceptance_is_one_minus_total_variation(name: str) -> None:
    """Sum of min(p, q), not the far smaller chance that two independent draws agree; enumerated, both places."""
    s, tape, out = enumerated(name)
    columns = list(s.d2t or range(V))
    expected, reach = [0.0, 0.0], {(): 1.0}
    for k in range(G):
        following = {}
        for made, mass in reach.items():
            p = next_token(s.p, s.order, PROMPT, made, s.sampling)
            q = np.zeros(V)
            q[columns] = next_draft(s, made, k)
            expected[k] += mass * np.minimum(p, q).sum()
            following |= {(*made, x): mass * min(p[x], q[x]) for x in range(V)}
        reach = following
    in_full = out.scenario == LENGTHS.index((G, G))
    for k in range(G):
        assert abs((tape.weight * in_full * (out.accepted[:, 0] > k)).sum() - expected[k]) <= EXACT


def next_draft(s: Setting, made: tuple[int, ...], k: int) -> np.ndarray:
    """``[Vd]`` the reference's q at place k behind the drafts ``made`` (no penalties)."""
    text = (*PROMPT, *made)
    index = 0
    for token in text[len(text) - s.draft_order :]:
        index = index * (V + 1) + token
    return distribution(s.q[k, index], s.sampling)


@pytest.mark.parametrize("name", ["penalties and filters", "trimmed, penalties and min-p"])
def test_q_rebuilt_is_the_distribution_the_draft_was_drawn_from(name: str) -> None:
    """After every processor: the row that is rebuilt for a rejected draft is what the noise was asked to draw from, and
    the log_q of a proposal is its entry at the token, bit for bit."""
    s, tape, out = enumerated(name)
    drawn = [x for x in tape.log_probs if x.shape[-1] == s.q.shape[-1]][:G]
    proposal, static = out.proposals[0], cycle.Static(rule=None if s.strengths is None else Penalties())
    places = [jnp.full(tape.rows, k) for k in range(G)]
    rows = [cycle_draws.draft_law(s.drafter, out.states[0], proposal, place, static) for place in places]
    log_q = np.stack([np.asarray(row) for row in rows], axis=1)
    at_token = np.take_along_axis(log_q, np.asarray(proposal.draft_index)[..., None], axis=2)[..., 0]
    np.testing.assert_array_equal(proposal.log_q, at_token)
    for k in range(G):
        np.testing.assert_array_equal(log_q[:, k], np.asarray(drawn[k]))
        np.testing.assert_allclose(np.exp(log_q[:, k]).sum(axis=-1), 1.0, atol=1e-14)
    assert (log_q == -np.inf).any()  # the filter did cut
    index = np.asarray(out.proposals[0].draft_index)
    tokens = np.asarray(out.proposals[0].tokens)
    np.testing.assert_array_equal(tokens, index if s.d2t is None else np.asarray(s.d2t)[index])


def test_greedy_rows_take_the_arg_max_beside_sampled_ones_whose_law_is_untouched() -> None:
    """Every second row is at temperature 0 (and draws nothing); a world is a pair of rows."""
    s = SETTINGS["plain"]()
    pairs = LARGEST // 2

    def mixed(tape: Tape) -> np.ndarray:
        state = open_slots(
            s.target,
            s.drafter,
            jnp.broadcast_to(jnp.asarray(PROMPT)[None], (tape.rows, len(PROMPT))),
            max_new_tokens=9,
        )
        cold = np.tile(np.array([1.0, 0.0], np.float32), pairs)
        state = state.replace(sampling=state.sampling.replace(temperature=jnp.asarray(cold)))
        static = cycle.Static(noise=tape)
        proposal = cycle.draft(s.drafter, state, num_drafts=G, static=static)
        _, result = cycle.step(s.target, s.drafter, state, proposal, jnp.full(tape.rows, G), static=static)
        return np.asarray(result.tokens[:, 0])

    tape, first = enumerate_worlds(mixed, 2, [V] * 4 + [2] * 4 + [V] * 2, pairs)
    sampled, greedy = first[0::2], first[1::2]
    law = next_token(s.p, s.order, PROMPT, (), s.sampling)
    assert (greedy == np.argmax(law)).all()
    np.testing.assert_allclose(np.bincount(sampled, tape.weight, V) / tape.weight.sum(), law, atol=EXACT)
