"""What generate() keeps: stop tokens, the limit, the end of the window; counts that always add up.

Scripted models, sixteen rows. A run without stops is the yardstick: with a stop token or a smaller limit the same
numbers are drawn, so the output must be that run cut at the right place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import GenerateOutput, generate
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget
from dspark_jax.types import EMPTY
from dspark_jax.verify import Verdict, commit

V, G, ROWS, NEW_TOKENS = 6, 3, 16, 24
NEVER = V - 1  # a token of probability 0: as a stop token it stops nothing
LONGEST = 5


@functools.cache
def models(max_positions: int = 1 << 20) -> tuple[ScriptedTarget, ScriptedDrafter]:
    """q is p plus some noise, so that blocks are accepted in part."""
    rng = np.random.default_rng(6)
    p = 1.5 * rng.normal(size=((V + 1) ** 2, V))
    p[:, NEVER] = -np.inf
    q = p + 0.7 * rng.normal(size=(G, *p.shape))
    target = ScriptedTarget(jnp.asarray(p, jnp.float32), order=2, max_positions=max_positions)
    return target, ScriptedDrafter(jnp.asarray(q, jnp.float32), vocab_size=V, order=2)


def requests() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    ids, lengths = rng.integers(0, NEVER, (ROWS, LONGEST)), rng.integers(1, LONGEST + 1, ROWS)
    lengths[0] = LONGEST
    return ids, lengths, np.arange(ROWS)


def run(
    stop: int = NEVER, new_tokens: int = NEW_TOKENS, drafts: bool = True, rule: str = "rejection"
) -> GenerateOutput:
    target, drafter = models()
    ids, lengths, seeds = requests()
    out = generate(
        target,
        drafter if drafts else None,
        ids,
        lengths,
        seeds=seeds,
        max_new_tokens=new_tokens,
        stop_token_ids=(NEVER, stop),
    )
    return jax.tree.map(np.asarray, out)


free = functools.cache(run)
"""``run``, remembered: the runs without a stop."""


def check_counts(out: GenerateOutput, limit: int) -> None:
    """The invariants of GenerateOutput."""
    assert (1 + out.committed.sum(axis=1) == out.lengths).all()
    assert out.tokens.shape == (ROWS, limit) and out.committed.shape == out.offered.shape == (ROWS, max(limit - 1, 1))
    real = np.arange(limit)[None, :] < out.lengths[:, None]
    assert ((out.tokens != EMPTY) == real).all()
    # A row's cycles are its leading ones, every one commits at least a token and at most one more than offered.
    cycles = out.committed > 0
    assert (cycles == (np.cumsum(~cycles, axis=1) == 0)).all()
    assert (out.committed <= out.offered + 1).all() and (out.offered[~cycles] == 0).all()


@dataclass
class Cut:
    """One row as it must be with a stop token and a limit."""

    tokens: list[int]
    committed: list[int]
    offered: list[int]
    ended_by: str = "limit"


def cut(tokens: np.ndarray, committed: np.ndarray, offered: np.ndarray, stop: int, limit: int) -> Cut:
    """Cuts a row of the yardstick by hand."""
    out, at = Cut([int(tokens[0])], [], []), 1
    if tokens[0] == stop:
        out.ended_by = "first token"
        return out
    for count, width in zip(committed, offered, strict=True):
        if count == 0 or len(out.tokens) == limit:
            break
        block = tokens[at : at + count].tolist()
        at += count
        kept, room, new_width = list(block), limit - len(out.tokens), int(width)
        if stop in block:
            place = block.index(stop)
            if place < count - 1:  # among the accepted drafts: nothing after it counts as offered
                kept, new_width = block[: place + 1], place + 1
            if len(kept) <= room:
                out.ended_by = "accepted draft" if place < count - 1 else "own token"
        out.tokens += kept[:room]
        out.committed.append(len(kept[:room]))
        out.offered.append(new_width)
        if out.ended_by != "limit":
            break
    return out


@pytest.mark.parametrize("drafts", [True, False])
def test_text_is_cut_at_the_first_stop_token_and_counters_with_it(drafts: bool) -> None:
    """Wherever it stands: as first token, as an accepted draft, as the target's own token behind a block."""
    whole, met = free(drafts=drafts), set()
    check_counts(whole, NEW_TOKENS)
    for stop in range(NEVER):
        out = run(stop, drafts=drafts)
        check_counts(out, NEW_TOKENS)
        for row in range(ROWS):
            expected = cut(whole.tokens[row], whole.committed[row], whole.offered[row], stop, NEW_TOKENS)
            met.add(expected.ended_by)
            assert out.tokens[row, : out.lengths[row]].tolist() == expected.tokens
            assert out.committed[row][out.committed[row] > 0].tolist() == expected.committed
            assert out.offered[row, : len(expected.offered)].tolist() == expected.offered
    assert {"first token", "own token"} <= met and ("accepted draft" in met) == drafts


@pytest.mark.parametrize("limit", [1, 9])
def test_exactly_as_many_tokens_as_asked_for_are_made(limit: int) -> None:
    """Blocks are not shortened because few tokens remain: the same numbers are drawn, the last cycle is cut."""
    whole, out = free(), run(new_tokens=limit)
    check_counts(out, limit)
    assert (out.lengths == limit).all()
    np.testing.assert_array_equal(out.tokens, whole.tokens[:, :limit])
    for row in range(ROWS):
        expected = cut(whole.tokens[row], whole.committed[row], whole.offered[row], NEVER, limit)
        assert out.committed[row][out.committed[row] > 0].tolist() == expected.committed
        assert (out.offered[row, : len(expected.offered)] == G).all()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # accepted, admitted, remaining, stop, place of NaN    -> count, accepted, offered, ended by
        ((3, 3, 9, 7, None), (4, 3, 3, "")),
        ((1, 3, 9, 7, None), (2, 1, 3, "")),
        ((3, 3, 9, 2, None), (2, 2, 2, "stop")),  # draft 2 of 3
        ((3, 3, 9, 5, None), (4, 3, 3, "stop")),  # the target's own token
        ((3, 3, 2, 7, None), (2, 3, 3, "limit")),
        ((3, 3, 2, 2, None), (2, 2, 2, "stop")),
        ((3, 3, 1, 2, None), (1, 3, 3, "limit")),  # a stop token behind the limit leaves no trace
        ((3, 3, 9, 7, 2), (2, 3, 3, "failure")),
        ((3, 3, 9, 7, 0), (0, 0, 0, "failure")),
        ((2, 3, 9, 7, 3), (3, 2, 3, "")),  # behind the emitted tokens: nothing was drawn from it
        ((3, 3, 2, 7, 2), (2, 3, 3, "limit")),
        ((3, 3, 9, 2, 3), (2, 2, 2, "stop")),
        ((3, 3, 9, 4, 2), (2, 3, 3, "failure")),  # a stop token behind NaN is none
    ],
)
def test_a_cycle_ends_at_a_stop_the_limit_or_a_failure_whichever_is_first(
    case: tuple[int, int, int, int, int | None], expected: tuple[int, int, int, str]
) -> None:
    """Drafts 1, 2, 3 and the target's own token 5, or the one in the place where the drafts end; by hand."""
    accepted, admitted, remaining, stop, nan = case
    sound = np.ones((1, 4), bool)
    if nan is not None:
        sound[0, nan] = False
    found = commit(
        Verdict(jnp.asarray([accepted]), jnp.asarray([5])),
        jnp.asarray([[1, 2, 3]]),
        jnp.asarray([admitted]),
        jnp.asarray([True]),
        jnp.asarray([remaining]),
        jnp.asarray([[stop, EMPTY]]),
        jnp.asarray(sound),
    )
    count, *counts, ended = expected
    emitted = [1, 2, 3][:accepted] + [5]
    assert found.tokens[0].tolist() == emitted[:count] + [EMPTY] * (4 - count)
    assert [int(found.count[0]), int(found.accepted[0]), int(found.offered[0])] == [count, *counts]
    flags = [bool(f[0]) for f in (found.finished, found.stopped, found.failed)]
    assert flags == [ended != "", ended == "stop", ended == "failure"]


def test_a_block_shrinks_at_the_end_of_the_window_and_nowhere_else() -> None:
    """The longest row fills its window to the last position; drafts beyond it are not offered."""
    target, drafter = models(LONGEST + NEW_TOKENS)
    ids, lengths, seeds = requests()
    out = jax.tree.map(
        np.asarray,
        generate(
            target,
            drafter,
            ids,
            lengths,
            seeds=seeds,
            max_new_tokens=NEW_TOKENS,
            verification="coupled",
            stop_token_ids=(NEVER, NEVER),
        ),
    )
    check_counts(out, NEW_TOKENS)
    np.testing.assert_array_equal(out.tokens, free(drafts=False).tokens)
    shrunk = 0
    for row in range(ROWS):
        anchor = lengths[row] + np.concatenate([[0], np.cumsum(out.committed[row])[:-1]])
        room = LONGEST + NEW_TOKENS - 1 - anchor
        expected = np.where(out.committed[row] > 0, np.minimum(G, room), 0)
        np.testing.assert_array_equal(out.offered[row], expected)
        shrunk += int((expected[out.committed[row] > 0] < G).any())
    assert shrunk > 0


def test_traced_lengths_end_a_row_at_the_window_and_leave_an_empty_row_empty() -> None:
    """Under jit nobody can check the values: a row stops at the last position, one of length 0 (or too long) makes
    nothing, and neither disturbs its neighbours."""
    window = 16
    target, drafter = models(window)
    ids, lengths, seeds = requests()
    bad = lengths.copy()
    bad[3], bad[4] = 0, LONGEST + 2
    run_it = jax.jit(functools.partial(generate, max_new_tokens=15, verification="coupled"))
    out = jax.tree.map(np.asarray, run_it(target, drafter, ids, bad, seeds=seeds))
    plain = free(drafts=False).tokens
    for row in range(ROWS):
        made = 0 if row in (3, 4) else min(15, window - lengths[row])
        assert out.lengths[row] == made
        assert out.tokens[row].tolist() == plain[row, :made].tolist() + [EMPTY] * (15 - made)
    assert (out.lengths < 15).any()


def test_pad_ids_are_ignored() -> None:
    """Whatever stands right of a prompt, negative ids included."""
    target, drafter = models()
    ids, lengths, seeds = requests()
    for pad in (-100, 10**6):
        padded = np.where(np.arange(LONGEST)[None, :] < lengths[:, None], ids, pad)
        out = generate(target, drafter, padded, lengths, seeds=seeds, max_new_tokens=9, stop_token_ids=(NEVER, NEVER))
        np.testing.assert_array_equal(np.asarray(out.tokens), run(new_tokens=9).tokens)
