"""Speculative text is plain text: token for token, in float64, on tiny random transformers of every drafter kind.

One program a drafter decodes a batch in which greedy rows and rows of several temperatures and filters are mixed;
it is then run with many seeds. ``coupled`` rows must give the text of plain sampling with that seed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import GenerateOutput, Sampling, generate
from dspark_jax.drafters import Drafter
from dspark_jax.targets import Target
from dspark_jax.testing import tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("x64")

NEW_TOKENS = 20
SETTINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
    Sampling(temperature=1.2, min_p=0.02),
    Sampling(temperature=2.5),
)
ROWS = len(SETTINGS)
SEEDS = 12

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("qwen3", {"head": "vanilla"}),
    "gated": ("qwen3", {"head": "gated"}),
    "rnn": ("qwen3", {"head": "rnn"}),
    "dflash": ("qwen3", {"head": "none"}),
    "trimmed": ("qwen3", {"head": "vanilla", "draft_vocab_size": 20}),
    "fill-in layout": ("qwen3", {"head": "vanilla", "sample_from_anchor": False}),
    "llama, embedding tapped, two layers": (
        "llama",
        {"head": "gated", "num_layers": 2, "target_layer_ids": (-1, 1), "confidence": False},
    ),
}


@functools.cache
def models(kind: str) -> tuple[Target, Drafter]:
    family, options = KINDS[kind]
    target = tiny_target(family, num_layers=2, dtype=jnp.float64, tie_embeddings=family == "llama")
    return target, tiny_drafter(target, block_size=3, **{"target_layer_ids": (0,), **options})


def prompts(batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random prompts ``[ROWS, 7]`` of 1 to 7 tokens, with seeds; what lies beyond a length is noise."""
    rng = np.random.default_rng(batch)
    return (
        rng.integers(0, 31, (ROWS, 7), dtype=np.int32),
        rng.integers(1, 8, ROWS, dtype=np.int32),
        rng.integers(0, 1 << 32, ROWS, dtype=np.uint32),
    )


def decode(target: Target, drafter: Drafter | None, batch: int, **options: Any) -> GenerateOutput:
    ids, lengths, seeds = prompts(batch)
    settings = {"sampling": SETTINGS, "verification": "coupled", "max_new_tokens": NEW_TOKENS, **options}
    return generate(target, drafter, ids, lengths, seeds=seeds, **settings)


@functools.cache
def plain(family: str, batch: int) -> np.ndarray:
    """``[ROWS, NEW_TOKENS]``, one token a cycle."""
    kind = next(k for k, (f, _) in KINDS.items() if f == family)
    return np.asarray(decode(models(kind)[0], None, batch).tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_every_drafter_kind_is_the_plain_text(kind: str) -> None:
    """Greedy rows and coupled rows, twelve batches of six prompts and seeds each; and drafts are really accepted."""
    target, drafter = models(kind)
    accepted = offered = 0
    for batch in range(SEEDS):
        out = decode(target, drafter, batch)
        np.testing.assert_array_equal(np.asarray(out.tokens), plain(KINDS[kind][0], batch))
        assert (1 + out.committed.sum(axis=1) == out.lengths).all() and (out.lengths == NEW_TOKENS).all()
        accepted += int((out.committed - (out.committed > 0)).sum())
        offered += int(out.offered.sum())
    assert 0.1 * offered < accepted < offered


def test_text_depends_neither_on_the_number_of_drafts_nor_on_the_width_they_are_drafted_at() -> None:
    """k = 2 < G: the whole block runs and two drafts are kept; with ``block_widths`` a backbone of width 2 runs,
    which is another function (other drafts), and the text is the same again."""
    target, drafter = models("vanilla")
    narrow = drafter.replace(config=replace(drafter.config, block_widths=(2,)))
    committed = []
    for d in (drafter, narrow):
        for batch in range(3):
            out = decode(target, d, batch, num_speculative_tokens=2)
            np.testing.assert_array_equal(np.asarray(out.tokens), plain("qwen3", batch))
            np.testing.assert_array_equal(np.asarray(out.offered), 2 * (np.asarray(out.committed) > 0))
            committed.append(np.asarray(out.committed))
    assert (np.stack(committed[:3]) != np.stack(committed[3:])).any()


def test_a_threshold_changes_what_is_offered_but_not_the_coupled_text() -> None:
    target, drafter = models("rnn")
    offered = set()
    for batch in range(3):
        out = decode(target, drafter, batch, admit="threshold", confidence_threshold=0.5)
        np.testing.assert_array_equal(np.asarray(out.tokens), plain("qwen3", batch))
        offered |= set(np.asarray(out.offered)[np.asarray(out.committed) > 0].tolist())
    assert offered == {0, 1, 2, 3}


def test_rejection_rows_depend_on_no_batch_mate_and_greedy_ones_are_plain_text() -> None:
    """At fixed length: the same prompt, seed and settings in another place, among other prompts, give the same text.

    Rows 2 and 3 have the same settings and change places; everything else in the batch is another request.
    """
    target, drafter = models("vanilla")
    decode_rejection = functools.partial(
        generate, target, drafter, sampling=SETTINGS, verification="rejection", max_new_tokens=NEW_TOKENS
    )
    differs = 0
    for batch in range(4):
        ids, lengths, seeds = prompts(batch)
        other_ids, other_lengths, other_seeds = prompts(100 + batch)
        first = decode_rejection(ids, lengths, seeds=seeds)
        for mine, theirs in ((2, 3), (3, 2)):
            other_ids[theirs], other_lengths[theirs], other_seeds[theirs] = ids[mine], lengths[mine], seeds[mine]
        second = decode_rejection(other_ids, other_lengths, seeds=other_seeds)
        for mine, theirs in ((2, 3), (3, 2)):
            for name in ("tokens", "committed", "offered"):
                a, b = np.asarray(getattr(first, name)), np.asarray(getattr(second, name))
                np.testing.assert_array_equal(a[mine], b[theirs])
        np.testing.assert_array_equal(np.asarray(first.tokens[:2]), plain("qwen3", batch)[:2])
        differs += int((np.asarray(first.tokens[2:]) != plain("qwen3", batch)[2:]).any(axis=1).sum())
    assert differs > 8  # of 16 sampled rows: rejection has its own numbers


def test_coupled_rows_depend_on_no_batch_mate() -> None:
    """Plain decoding of one prompt among others, with the row's own seed: the same text in another place."""
    target, drafter = models("vanilla")
    ids, lengths, seeds = prompts(0)
    order = np.array([1, 0, 3, 2, 4, 5])
    out = generate(
        target,
        drafter,
        ids[order],
        lengths[order],
        seeds=seeds[order],
        sampling=SETTINGS,
        verification="coupled",
        max_new_tokens=NEW_TOKENS,
    )
    np.testing.assert_array_equal(np.asarray(out.tokens), plain("qwen3", 0)[order])


def test_generate_is_the_same_inside_a_jitted_function_and_with_scanned_layers() -> None:
    """Prompts, lengths and seeds traced, the models arguments, as a user writes it; layers in the stacked form."""
    _, drafter = models("dflash")
    scanned = tiny_target(num_layers=2, dtype=jnp.float64, scan=True)
    ids, lengths, seeds = prompts(0)
    settings = {"max_new_tokens": NEW_TOKENS, "sampling": SETTINGS, "verification": "coupled"}
    out = jax.jit(functools.partial(generate, **settings))(scanned, drafter, ids, lengths, seeds=seeds)
    np.testing.assert_array_equal(np.asarray(out.tokens), plain("qwen3", 0))
    np.testing.assert_array_equal(np.asarray(out.committed), np.asarray(decode(*models("dflash"), 0).committed))
