"""Records of full blocks: the cycles are those of ``generate``, the overlap is the chance of acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.evaluate.recorder import Blocks, Recorder
from dspark_jax.generate import generate
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget

VOCAB, BLOCK, NEW = 7, 3, 24
PROMPTS = [[i % VOCAB, (3 * i) % VOCAB][: 1 + i % 2] for i in range(24)]
D2T = np.array([0, 2, 3, 5, 6])


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def models() -> tuple[ScriptedTarget, ScriptedDrafter, np.ndarray, np.ndarray]:
    """Target, drafter of a trimmed vocabulary, and their tables of probabilities ``[V + 1, V]``, ``[G, V + 1, V]``."""
    rng = np.random.default_rng(1)
    table = 1.5 * rng.normal(size=(VOCAB + 1, VOCAB))
    draft = table[:, D2T] + 0.8 * rng.normal(size=(BLOCK, VOCAB + 1, len(D2T)))
    confidence = rng.normal(size=(BLOCK, VOCAB + 1))
    target = ScriptedTarget(jnp.asarray(table), max_positions=64)
    drafter = ScriptedDrafter(jnp.asarray(draft), jnp.asarray(confidence), jnp.asarray(D2T, jnp.int32), VOCAB)
    q = np.zeros((BLOCK, VOCAB + 1, VOCAB))
    q[:, :, D2T] = np.exp(draft) / np.exp(draft).sum(-1, keepdims=True)
    return target, drafter, np.exp(table) / np.exp(table).sum(-1, keepdims=True), q


def recorded(sampling: Sampling, verification: str, stop_ids: tuple[int, ...] = ()) -> tuple[Blocks, Any, Any]:
    """The recorder's blocks, and what ``generate`` does with the same rows."""
    target, drafter, _, _ = models()
    recorder = Recorder(
        target,
        drafter,
        sampling=sampling,
        verification=verification,
        max_new_tokens=NEW,
        longest=2,
        stop_ids=stop_ids,
    )
    blocks, tokens = recorder.batch(PROMPTS, range(24), first=100)
    padded = jnp.asarray([[*p, 0][:2] for p in PROMPTS], jnp.int32)
    out = generate(
        target,
        drafter,
        padded,
        jnp.asarray([len(p) for p in PROMPTS]),
        seeds=jnp.arange(24, dtype=jnp.uint32),
        max_new_tokens=NEW,
        sampling=sampling,
        verification=verification,
        stop_token_ids=stop_ids,
    )
    assert tokens == int(out.lengths.sum())
    return blocks, out, drafter


def by_prompt(blocks: Blocks) -> list[list[int]]:
    return [blocks.accepted[blocks.prompt == 100 + row].tolist() for row in range(24)]


def test_blocks_are_the_cycles_of_generate_and_their_overlap_is_the_chance_of_acceptance() -> None:
    """Rejection at T = 1. Given the drafts before it, draft k is accepted with probability 1 - TV: over all tested
    drafts the surplus of acceptances is a sum of independent-increment terms of variance o (1 - o), here below 4.9
    standard deviations (false alarm 1e-6). The overlaps are among the values that the tables allow."""
    blocks, out, drafter = recorded(Sampling(), "rejection")
    cycles = np.asarray(out.committed) > 0
    assert by_prompt(blocks) == [np.asarray(out.accepted)[row][cycles[row]].tolist() for row in range(24)]

    tested = blocks.accepted[:, None] >= np.arange(BLOCK)
    passed = blocks.labels.astype(bool)
    o = blocks.overlap
    surplus = (passed.astype(float) - o)[tested].sum()
    deviation = np.sqrt((o * (1 - o))[tested].sum())
    assert len(blocks) > 150 and deviation > 5 and abs(surplus) < 4.9 * deviation

    _, _, p, q = models()
    confidences = np.asarray(drafter.confidence)
    for k in range(BLOCK):
        allowed = np.minimum(p, q[k]).sum(-1)  # by the token before
        at = np.abs(blocks.overlap[:, k, None] - allowed).argmin(1)
        np.testing.assert_allclose(blocks.overlap[:, k], allowed[at], atol=1e-6)
        np.testing.assert_allclose(blocks.confidence[:, k], confidences[k, at], atol=1e-6)


@pytest.mark.slow
def test_at_temperature_zero_the_overlap_says_whether_a_draft_is_accepted() -> None:
    """One-hot distributions: 1 up to the accepted prefix, 0 behind it. A block that a stop token ends is left out."""
    blocks, out, _ = recorded(Sampling(0.0), "rejection")
    prefix = np.cumprod(blocks.overlap, axis=1)
    np.testing.assert_array_equal(prefix, blocks.labels)
    stop = int(np.asarray(out.tokens)[0, 5])
    stopped, short, _ = recorded(Sampling(0.0), "rejection", (stop,))
    ends = [int(row[n - 1]) == stop for row, n in zip(np.asarray(short.tokens), short.lengths.tolist(), strict=True)]
    assert any(ends)
    cycles = (np.asarray(short.committed) > 0).sum(1)
    assert [len(rows) for rows in by_prompt(stopped)] == [
        max(n - end, 0) for n, end in zip(cycles.tolist(), ends, strict=True)
    ]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = Blocks(
        rng.normal(size=(4, 2)).astype(np.float32), np.array([0, 2, 1, 0]), rng.random((4, 2)), np.arange(4)
    )
    blocks.save(tmp_path / "a" / "b.npz")
    again = Blocks.load(tmp_path / "a" / "b.npz")
    np.testing.assert_array_equal(again.confidence, blocks.confidence)
    np.testing.assert_array_equal(again.labels, [[0, 0], [1, 1], [1, 0], [0, 0]])
    assert len(Blocks.join([blocks, again])) == 8 and [p.name for p in (tmp_path / "a").iterdir()] == ["b.npz"]


def test_a_drafter_without_confidences_is_refused() -> None:
    target, drafter, _, _ = models()
    with pytest.raises(ValueError, match="confidence head"):
        Recorder(
            target,
            drafter.replace(confidence=None),
            sampling=Sampling(),
            verification="coupled",
            max_new_tokens=2,
            longest=2,
        )
