"""scripts/parity.py on cases that nobody has seen: other shapes, heads, layer ids, block sizes, tied embeddings.

The expected arrays come from an independent NumPy model (reference.py) in float64, so tokens and counts must be equal
and floats agree to 1e-9. The same model checks the drafter's positions behind 2 and behind 4096 tokens of context.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters import Drafter
from dspark_jax.evaluate.parity import compute, load_case
from dspark_jax.layout import dense_layout
from dspark_jax.types import Array, PyTree
from tests.drafted import block_logits
from tests.parity.made_up import MadeUp

pytestmark = pytest.mark.usefixtures("x64")

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rnn head, embedding tapped, tied target, confidence without Markov": (
        {"tie_word_embeddings": True},
        {"markov_head_type": "rnn", "target_layer_ids": [-1, 1, 2], "confidence_head_with_markov": False},
    ),
    "DFlash, one layer, block of two": (
        {"num_attention_heads": 2},
        {"markov_rank": 0, "enable_confidence_head": False, "num_hidden_layers": 1, "block_size": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_array_of_an_unseen_layout_is_the_reference_models(name: str, tmp_path: Path) -> None:
    made_up = MadeUp(tmp_path, len(name), *LAYOUTS[name])
    expected = made_up.write(2)
    got = compute(load_case(tmp_path, "float64"))
    assert not sorted(expected.keys() - got.keys())
    for key, want in expected.items():
        if want.dtype.kind == "f":
            limit = 1e-9 if want.ndim else 1e-6  # scalars are stored as float32
            np.testing.assert_allclose(got[key], want, rtol=limit, atol=1e-9, err_msg=key)
        else:
            np.testing.assert_array_equal(got[key], want, err_msg=key)


class Greedy:
    """A sampler that takes the arg-max."""

    def start(self) -> PyTree:
        return None

    def numbers(self, places: int) -> None:
        return None

    def draw(self, state: PyTree, logits: Array, k: Array | int) -> tuple[Array, Array, Array, PyTree]:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, token, jnp.max(logits, axis=-1), state


@partial(jax.jit, static_argnames="drafts")
def propose(drafter: Drafter, features: Array, anchor: Array, length: Array, drafts: int) -> tuple[Array, ...]:
    """``features [1, cells, m * d]``; only the first ``length`` of them are context, the rest is garbage."""
    rows, cells = features.shape[:2]
    layout = dense_layout(jnp.zeros(rows, jnp.int32), jnp.full(rows, cells), cells)
    state = drafter.init(rows, cells + drafter.block_size)
    nothing = jnp.zeros(rows * cells, jnp.int32)
    state = drafter.absorb(state, features.reshape(rows * cells, -1), layout, nothing, layout.count)
    block = drafter.propose(state, anchor, length, drafts, Greedy())
    assert block.confidence_logits is not None
    return block.tokens, block_logits(drafter, block), block.confidence_logits


def drafted(drafter: Drafter, features: np.ndarray, context: int, drafts: int) -> tuple[np.ndarray, ...]:
    one = [jnp.asarray([x], jnp.int32) for x in (5, context)]
    return tuple(np.asarray(x[0]) for x in propose(drafter, jnp.asarray(features)[None], *one, drafts=drafts))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_drafter_logits_are_the_references_behind_2_and_behind_4096_tokens(head: str, tmp_path: Path) -> None:
    """A block whose rotary positions are one too early looks fine at a short context (FIELD.md): every position is
    absolute. The drafter reads a cache of 4096 cells in both cases, most of them garbage in the first."""
    made_up = MadeUp(tmp_path, 7, {}, {"markov_head_type": head, "target_layer_ids": [0, 1]})
    made_up.write(0)
    drafter = load_case(tmp_path, "float64").models.drafter
    features = np.random.default_rng(8).normal(size=(4096, 2 * 24))
    for context in (2, 4096):
        tokens, logits, confidence = drafted(drafter, features, context, 5)
        want = made_up.drafter.draft(features[:context], 5)
        np.testing.assert_array_equal(tokens, want["draft_tokens"])
        np.testing.assert_allclose(logits, want["corrected_logits"], atol=1e-9)
        np.testing.assert_allclose(confidence, want["confidence_logits"], atol=1e-9)
        early = made_up.drafter.draft(features[:context], 5, shift=-1)
        assert np.abs(early["corrected_logits"] - want["corrected_logits"]).max() > 1e-3


@pytest.mark.parametrize("widths", [(), (2,)])
def test_fewer_drafts_are_those_of_the_whole_block_unless_their_width_was_trained(
    widths: tuple[int, ...], tmp_path: Path
) -> None:
    """Two drafts of a block of five: the first two of five, or with ``block_widths`` those of a block of two. The
    block attends to itself in both directions, so the two differ."""
    made_up = MadeUp(tmp_path, 9, {}, {"target_layer_ids": [0, 1]})
    made_up.write(0)
    drafter = load_case(tmp_path, "float64").models.drafter
    drafter = drafter.replace(config=replace(drafter.config, block_widths=widths))
    features = np.random.default_rng(8).normal(size=(30, 2 * 24))
    five = made_up.drafter.draft(features, 5)["corrected_logits"][:2]
    made_up.drafter.k = 2
    two = made_up.drafter.draft(features, 5)["corrected_logits"]
    _, logits, _ = drafted(drafter, features, 30, 2)
    np.testing.assert_allclose(logits, two if widths else five, atol=1e-9)
    assert np.abs(two - five).max() > 1e-3
