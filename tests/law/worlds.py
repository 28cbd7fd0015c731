"""Two consecutive cycles over every branch: vocabulary 3, block 2, scripted models, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.drafters.base import Proposal
from dspark_jax.generate import _admitted
from dspark_jax.logit_rule import Penalties, PenaltyState
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget, Tape, enumerate_worlds, open_slots
from dspark_jax.types import Array
from tests.law.exact import Strengths, emitted_law, text_law

V, G = 3, 2
PROMPT = (2, 0, 1)

Admission = Callable[[Proposal, Tape], Array]


def tables(seed: int, order: int = 2, columns: int = V, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Random target logits ``[(V + 1) ** order, V]`` and draft logits ``[G, (V + 1) ** order, columns]``."""
    rng = np.random.default_rng(seed)
    contexts = (V + 1) ** order
    return spread * rng.normal(size=(contexts, V)), spread * rng.normal(size=(G, contexts, columns))


@dataclass(frozen=True)
class Setting:
    """One way to decode; the models are tables of the last ``order`` tokens."""

    p: np.ndarray
    q: np.ndarray
    order: int = 2
    draft_order: int = 2
    d2t: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    strengths: Strengths | None = None
    confidence: np.ndarray | None = None
    peek: bool = False

    @property
    def target(self) -> ScriptedTarget:
        return ScriptedTarget(jnp.asarray(self.p), order=self.order)

    @property
    def drafter(self) -> ScriptedDrafter:
        return ScriptedDrafter(
            jnp.asarray(self.q),
            None if self.confidence is None else jnp.asarray(self.confidence),
            None if self.d2t is None else jnp.asarray(self.d2t, jnp.int32),
            vocab_size=V,
            order=self.draft_order,
            peek=self.peek,
        )

    @property
    def law(self) -> np.ndarray:
        """The target's, by the reference."""
        strengths = self.strengths or Strengths()
        return text_law(self.p, self.order, PROMPT, 2 * (G + 1), self.sampling, strengths)


@dataclass
class Outcome:
    """What every branch did."""

    tokens: np.ndarray  # [N, M] emitted tokens packed to the left
    count: np.ndarray  # [N]
    scenario: np.ndarray  # [N] number of the test's own choices
    accepted: np.ndarray  # [N, 2]
    offered: np.ndarray  # [N, 2]
    proposals: list[Proposal]
    states: list[cycle.DecodeState]  # before each cycle, without caches


LENGTHS = tuple((a, b) for a in range(G + 1) for b in range(G + 1))
"""Drafts admitted in the first and in the second cycle: every pair is a scenario; the last scenario is a rule's."""

RULED = len(LENGTHS)


LARGEST = (RULED + 1) * (V**G * 2**G * V) ** 2
"""Rows of the largest case; all cases are filled up to it, so that they share their compiled operations."""


def every_length_or(rule: Callable[[Proposal], Array]) -> Admission:
    """Scenarios 0..RULED - 1 admit ``LENGTHS``, scenario RULED follows the rule in both cycles."""

    def admit(proposal: Proposal, tape: Tape) -> Array:
        second = bool(tape.picks)
        chosen = tape.picks[0] if second else tape.pick(RULED + 1)
        fixed = np.array([*(pair[second] for pair in LENGTHS), 0])[chosen]
        return jnp.where(jnp.asarray(chosen == RULED), rule(proposal), jnp.asarray(fixed)).astype(jnp.int32)

    return admit


def above_half(proposal: Proposal) -> Array:
    """The product's threshold rule at 1/2: what ``generate(admit="threshold")`` runs."""
    active = jnp.ones(proposal.tokens.shape[0], bool)
    return _admitted(proposal, active, "threshold", jnp.asarray(0.5), None, None, 0.0)


def penalty_state(strengths: Strengths | None, rows: int) -> Any:
    """State of ``Penalties`` behind PROMPT, None without penalties."""
    if strengths is None:
        return None
    seen = jnp.zeros((rows, V), bool).at[:, jnp.asarray(PROMPT)].set(True)
    full = {name: jnp.full(rows, value, jnp.float32) for name, value in vars(strengths).items()}
    return PenaltyState(in_prompt=seen, counts=jnp.zeros((rows, V), jnp.int32), **full)


def decode(setting: Setting, admit: Admission, tape: Tape) -> Outcome:
    """The branches of two cycles."""
    target, drafter, rows = setting.target, setting.drafter, tape.rows
    rule = None if setting.strengths is None else Penalties()
    state = open_slots(
        target,
        drafter,
        jnp.broadcast_to(jnp.asarray(PROMPT)[None, :], (rows, len(PROMPT))),
        max_new_tokens=1 << 10,
        sampling=setting.sampling,
        rule=rule,
        rule_state=penalty_state(setting.strengths, rows),
    )
    static = cycle.Static(noise=tape, rule=rule)
    results, proposals, states = [], [], []
    for _ in range(2):
        states.append(state.small())
        proposal = cycle.draft(drafter, state, num_drafts=G, static=static)
        admitted = admit(proposal, tape)
        state, result = cycle.step(target, drafter, state, proposal, admitted, static=static)
        results.append(result)
        proposals.append(proposal)
    scenario = tape.picks[0] if tape.picks else np.zeros(rows, np.int64)
    tokens, count = pack([(np.asarray(r.tokens), np.asarray(r.count)) for r in results])
    return Outcome(
        tokens,
        count,
        scenario,
        np.stack([np.asarray(r.accepted) for r in results], axis=1),
        np.stack([np.asarray(r.offered) for r in results], axis=1),
        proposals,
        states,
    )


def pack(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins ``(tokens [N, W], count [N])`` of consecutive cycles into ``(tokens [N, M], count [N])``."""
    total = sum(width.shape[1] for width, _ in parts)
    rows = parts[0][1].size
    tokens, count = np.full((rows, total + 1), -1), np.zeros(rows, np.int64)
    for block, used in parts:
        for k in range(block.shape[1]):
            place = np.where(k < used, count + k, total)
            tokens[np.arange(rows), place] = block[:, k]
        count = count + used
    return tokens[:, :total], count


def enumerate_two_cycles(setting: Setting, admit: Admission) -> tuple[Tape, Outcome]:
    """All worlds; ``admit`` makes one pick in the first cycle (``every_length_or``)."""
    columns = setting.q.shape[-1]
    drafts, rest = [columns] * G, [2] * G + [V]
    arities = [*drafts, RULED + 1, *rest, *drafts, *rest]
    return enumerate_worlds(lambda tape: decode(setting, admit, tape), arities=arities, at_least=LARGEST)


def law_errors(setting: Setting, tape: Tape, out: Outcome) -> np.ndarray:
    """``[RULED + 1]``: how far the law of the emitted tokens is from the target's, for each way to admit."""
    law = setting.law
    found = emitted_law(out.tokens, out.count, tape.weight, out.scenario, law, V)
    assert abs(found.sum(axis=1) - 1.0).max() < 1e-12, "the branches of a scenario must have mass 1"
    return np.abs(found - law[None, :]).max(axis=1)


def errors(setting: Setting, admit: Admission) -> np.ndarray:
    """``law_errors`` of all worlds."""
    return law_errors(setting, *enumerate_two_cycles(setting, admit))
