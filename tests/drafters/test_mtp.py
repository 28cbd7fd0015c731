"""MTP: one module applied again and again drafts what its definition says and never changes the target's text."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_drafter
from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.drafters import MTPDrafter, drafter_specs
from dspark_jax.testing import tiny_target
from tests.drafters.chain_cases import Tiny, texts_by_block_length, tiny_chain
from tests.drafters.chain_checks import check_against_definition


@pytest.fixture(autouse=True)
def _float64(x64: None) -> None:
    """Token-exact claims are made in float64."""


def test_drafts_equal_an_independent_model() -> None:
    check_against_definition(tiny_chain(tiny_target(dtype=jnp.float64), "mtp"))


def test_a_window_a_trimmed_vocabulary_and_a_llama_layer_are_honoured() -> None:
    target = tiny_target("llama", dtype=jnp.float64)
    check_against_definition(tiny_chain(target, "mtp", window=2, trimmed=11))


def test_text_is_that_of_plain_decoding_whatever_the_block_length() -> None:
    """Greedy and coupled rows, blocks of 0 to 5 drafts; the head reads the target's last layer."""
    target = tiny_target(dtype=jnp.float64)
    texts, committed = texts_by_block_length(target, tiny_chain(target, "mtp").drafter)
    np.testing.assert_array_equal(texts, np.broadcast_to(texts[:, :1], texts.shape))
    assert (committed[:, 0] == 1).all() and (committed[:, 5] > 1.2).all()


def test_a_checkpoint_written_and_read_back_is_the_same_module(tmp_path: Path) -> None:
    """One draft a block by default; embedding and head are the target's."""
    target = tiny_target(dtype=jnp.float64)
    tiny = tiny_chain(target, "mtp")
    write_deepspec(tmp_path, tiny.drafter.config, tiny.params, drafter_specs(tiny.drafter.config))
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, MTPDrafter) and drafter.config == tiny.drafter.config
    assert (drafter.block_size, drafter.max_drafts, drafter.taps, drafter.has_confidence) == (1, None, (2,), False)
    assert drafter.shared.embed is target.params["embed_tokens"] and drafter.shared.head is target.params["lm_head"]
    check_against_definition(Tiny(drafter, tiny.params), drafts=2)
