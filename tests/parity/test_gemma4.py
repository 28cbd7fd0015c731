"""Gemma 4 and its DSpark drafter against the reference numbers (oracle/README, case ``gemma4_dspark``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.config import Sampling
from dspark_jax.drafters import dflash
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.generate import GenerateOutput
from dspark_jax.layout import dense_layout
from dspark_jax.targets import Target
from tests.oracle import oracle_dir

PROMPTS = ("p0", "p1", "p2")
LENGTH = 64  # cells of the caches of the hand-driven rounds


class Case(NamedTuple):
    target: Target
    drafter: Drafter
    expected: Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def case() -> Case:
    folder = oracle_dir() / "gemma4_dspark"
    target = dspark_jax.load_target(oracle_dir() / "targets" / "gemma4_tiny", dtype="float32")
    drafter = dspark_jax.load_drafter(folder / "draft", target)
    with np.load(folder / "expected.npz") as arrays:
        return Case(target, drafter, {key: arrays[key] for key in arrays.files})


# ---- one forward and three rounds, driven by hand ------------------------------------------------------------


class Greedy:
    """Draws the arg-max, and hands the logits it saw through in place of log q."""

    def start(self) -> Any:
        return jnp.zeros(())

    def draw(self, state: Any, logits: jax.Array, k: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, token, logits, state


def run(case: Case, tokens: np.ndarray, start: int, cache: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """(last hidden states, features, logits, cache) of one row of tokens from position ``start`` on."""
    layout = dense_layout(jnp.asarray([start]), jnp.asarray([len(tokens)]), len(tokens))
    hidden, features, cache = case.target.forward(jnp.asarray(tokens), layout, cache, taps=case.drafter.taps)
    return np.asarray(hidden), np.asarray(features), np.asarray(case.target.unembed(hidden)), cache


def absorb(case: Case, state: Any, features: np.ndarray, start: int) -> Any:
    layout = dense_layout(jnp.asarray([start]), jnp.asarray([len(features)]), len(features))
    return case.drafter.absorb(state, jnp.asarray(features), layout)


def assert_close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-4, rtol=1e-4)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target_states_and_logits_equal_the_reference(case: Case, prompt: str) -> None:
    """Prompts of 5, 16 and 20 tokens: the window of 12 cuts in the two longer ones."""
    want = {key: case.expected[f"{prompt}.{key}"] for key in ("target_last_hidden", "target_features", "target_logits")}
    got = run(case, case.expected[f"{prompt}.prompt_ids"], 0, case.target.init_cache(1, LENGTH))
    for value, expected in zip(got, want.values(), strict=False):
        assert_close(value, expected)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_three_rounds_equal_the_reference_array_by_array(case: Case, prompt: str) -> None:
    """Backbone, soft-capped logits, Markov bias behind the cap, confidence, verification, acceptance."""
    want, drafter = case.expected, case.drafter
    ids = want[f"{prompt}.prompt_ids"]
    _, features, _, cache = run(case, ids, 0, case.target.init_cache(1, LENGTH))
    state, held = drafter.init(1, LENGTH), 0
    for name in ("r0", "r1", "r2"):
        r = {key.split(".", 2)[2]: value for key, value in want.items() if key.startswith(f"{prompt}.{name}.")}
        start, anchor = int(r["start"]), int(r["block_input_ids"][0])
        assert held == int(r["cache_len_before"]) and held + len(features) == start == int(r["cache_len_after"])
        assert r["block_input_ids"].tolist() == [anchor] + [drafter.config.mask_token_id] * (drafter.block_size - 1)
        assert_close(features, r["context_features"])
        state, held = absorb(case, state, features, held), start
        at = (jnp.asarray([anchor]), jnp.asarray([start]), drafter.block_size)
        hidden = drafter.hidden(state, *at)
        assert_close(hidden[0], r["block_hidden"])
        base = dflash.base_logits(drafter.config, drafter.shared, hidden)
        assert_close(base[0], r["base_logits"])
        block = drafter.propose(state, *at, Greedy())
        np.testing.assert_array_equal(block.tokens[0], r["draft_tokens"])
        assert_close(block.log_q[0], r["corrected_logits"])
        assert block.confidence_logits is not None
        assert_close(block.confidence_logits[0], r["confidence_logits"])
        if "cache_k" in r:
            for mine, theirs in ((state.cache.k, r["cache_k"]), (state.cache.v, r["cache_v"])):
                assert_close(np.stack([a[0, :, :start] for a in mine]), theirs)
        drafts = np.asarray(block.tokens[0])
        _, features, logits, cache = run(case, np.concatenate([[anchor], drafts]), start, cache)
        assert_close(logits, r["verify_logits"])
        accepted = int(np.cumprod(drafts == logits[:-1].argmax(-1)).sum())
        assert accepted == int(r["accepted_draft_tokens"]) and logits[accepted].argmax() == int(r["next_token"])
        overlap = np.minimum(softmax(np.asarray(block.log_q[0])), softmax(logits[:-1])).sum(-1)
        np.testing.assert_allclose(overlap, r["accept_rate_t1"], atol=1e-5)
        features = features[: accepted + 1]


# ---- whole generations ---------------------------------------------------------------------------------------


def decode(case: Case, prompts: tuple[str, ...], drafter: Drafter | None, **options: Any) -> GenerateOutput:
    """64 greedy tokens of some prompts, all padded to one shape so that few programs are compiled."""
    rows = [case.expected[f"{p}.prompt_ids"] for p in prompts]
    width = max(len(case.expected[f"{p}.prompt_ids"]) for p in PROMPTS)
    padded = jnp.asarray([[*row, *[0] * (width - len(row))] for row in rows], jnp.int32)
    out = dspark_jax.generate(
        case.target,
        drafter,
        padded,
        jnp.asarray([len(row) for row in rows], jnp.int32),
        seeds=jnp.zeros(len(rows), jnp.uint32),
        max_new_tokens=64,
        sampling=Sampling(temperature=0.0),
        **options,
    )
    return jax.tree.map(np.asarray, out)


def assert_ended_at_the_limit(out: GenerateOutput, row: int, committed: np.ndarray, offered: np.ndarray) -> None:
    """Entry by entry, but for the reference's last round: ours is cut at the limit, or not run at all."""
    mine = out.committed[row][out.committed[row] > 0].tolist()
    assert mine[:-1] == committed[: len(mine) - 1].tolist() and mine[-1] <= committed[len(mine) - 1]
    assert 1 + sum(mine) == 64 and len(committed) - len(mine) in (0, 1)
    assert out.offered[row][: len(mine)].tolist() == offered[: len(mine)].tolist()


def test_greedy_generation_equals_the_reference_and_plain_decoding(case: Case) -> None:
    out, plain = decode(case, PROMPTS, case.drafter), decode(case, PROMPTS, None)
    for row, prompt in enumerate(PROMPTS):
        want = {key: case.expected[f"{prompt}.gen.{key}"] for key in ("output_ids", "target_greedy_ids")}
        np.testing.assert_array_equal(out.tokens[row], want["output_ids"])
        np.testing.assert_array_equal(plain.tokens[row], want["target_greedy_ids"])
        lengths = (case.expected[f"{prompt}.gen.{key}_lengths"] for key in ("acceptance", "proposal"))
        assert_ended_at_the_limit(out, row, *lengths)


def test_a_confidence_threshold_cuts_where_the_reference_cuts(case: Case) -> None:
    (threshold,) = {float(case.expected[f"{p}.thr.threshold"]) for p in PROMPTS}
    out = decode(case, PROMPTS, case.drafter, admit="threshold", confidence_threshold=threshold)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(out.tokens[row], case.expected[f"{prompt}.gen.output_ids"])
        lengths = (case.expected[f"{prompt}.thr.{key}_lengths"] for key in ("acceptance", "proposal"))
        assert_ended_at_the_limit(out, row, *lengths)


def test_a_stop_token_ends_the_text_where_the_reference_ends_it(case: Case) -> None:
    """``stop``: the token is an accepted draft; ``stop2``: it is the target's own."""
    for prompt in PROMPTS:
        for kind in ("stop", "stop2"):
            keys = ("token", "output_ids", "acceptance_lengths", "proposal_lengths")
            token, ids, committed, offered = (case.expected[f"{prompt}.{kind}.{key}"] for key in keys)
            out = decode(case, (prompt,), case.drafter, stop_token_ids=(int(token),))
            assert out.tokens[0][: out.lengths[0]].tolist() == ids.tolist(), (prompt, kind)
            cycles = int((out.committed[0] > 0).sum())
            assert out.committed[0][:cycles].tolist() == committed.tolist(), (prompt, kind)
            assert out.offered[0][:cycles].tolist() == offered.tolist(), (prompt, kind)
