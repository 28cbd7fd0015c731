"""Training-time test of chains against what decoding computes along the same text (the oracle's step: tests/parity)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.data.packing import BlockPlan, pack
from dspark_jax.drafters.chain import ChainDrafter
from dspark_jax.layout import dense_layout
from dspark_jax.targets import Target
from dspark_jax.train.chain_forward import chain_hidden, chain_states
from dspark_jax.types import EMPTY
from tests.drafters.chain_cases import tiny_chain

LENGTH, STEPS = 14, 4


@pytest.fixture(scope="module")
def target() -> Target:
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    config = DecoderConfig("llama", 24, 16, 32, 2, (layer,) * 3, tie_embeddings=True, max_positions=64)
    return Target.random(config, jax.random.key(0))


class _Forced:
    """A sampler that draws the text's own tokens, so that decoding walks the teacher-forced path."""

    def __init__(self, tokens: jax.Array) -> None:
        self.tokens = tokens

    def start(self) -> None:
        return None

    def draw(self, state: None, logits: jax.Array, k: Any) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        token = self.tokens[:, k]
        return token, token, logits, state


def _text(target: Target, features: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(2))
    tokens = jax.random.randint(keys[0], (2, LENGTH), 0, target.vocab_size)
    return tokens, jax.random.normal(keys[1], (2, LENGTH, features))


@pytest.mark.parametrize(("method", "window"), [("eagle3", 3), pytest.param("mtp", 0, marks=pytest.mark.slow)])
def test_every_step_equals_decoding_along_the_text(target: Target, method: str, window: int) -> None:
    """States of four steps behind anchors of two texts: those of ``walk`` on a cache that absorbed the text up to each
    anchor. The window of 3 ends within context and chain."""
    drafter, params = tiny_chain(target, method, window=window)
    chain: Any = drafter
    assert isinstance(chain, ChainDrafter)
    tokens, features = _text(target, 16 * len(drafter.taps))
    anchors = jnp.array([[3, 8], [10, 1]])

    @jax.jit
    def decoded(anchors: jax.Array) -> jax.Array:
        """One anchor a row."""
        rows = jnp.full(2, LENGTH)
        layout = dense_layout(jnp.zeros(2, jnp.int32), rows, LENGTH)
        state = chain.absorb(chain.init(2, LENGTH), features.reshape(2 * LENGTH, -1), layout, tokens.reshape(-1), rows)
        # Rows behind an anchor are garbage to it; the state that waits is the one before the anchor.
        waiting = chain.condense(features[jnp.arange(2), anchors - 1])
        ahead = anchors[:, None] + 1 + jnp.arange(STEPS)[None, :]
        sampler = _Forced(tokens.at[jnp.arange(2)[:, None], ahead].get(mode="fill", fill_value=0))
        anchor = tokens[jnp.arange(2), anchors]
        return chain.walk(state.replace(hidden=waiting), anchor, anchors, STEPS, sampler)[1]

    states = jax.jit(partial(chain_states, drafter.config, steps=STEPS))(
        params, drafter.shared, features, tokens, anchors
    )
    for i in range(anchors.shape[1]):
        np.testing.assert_allclose(states[:, i], decoded(anchors[:, i]), atol=2e-5, rtol=1e-5)


def test_widths_are_lengths_of_one_chain_and_nothing_from_the_anchor_on_is_read(target: Target) -> None:
    """A block of width w is the beginning of a longer one. The chain behind anchor 6 reads the states of positions 0
    to 5: changes behind them do nothing, a change at 5 does."""
    drafter, params = tiny_chain(target, "eagle3")
    tokens, features = _text(target, 16 * len(drafter.taps))
    anchors, keep = jnp.array([[6, 9, 6], [6, 3, 6]]), jnp.ones((2, 3), bool)

    @partial(jax.jit, static_argnums=1)
    def hidden(features: jax.Array, widths: tuple[int, ...]) -> jax.Array:
        plan = BlockPlan(widths)
        slots = pack(plan, anchors, keep, tokens, jnp.ones((2, LENGTH), bool), EMPTY)
        return chain_hidden(drafter.config, params, drafter.shared, features, tokens, plan, slots)

    ragged, whole = hidden(features, (2, 1, 4)), hidden(features, (4, 4, 4))
    np.testing.assert_allclose(ragged, whole[:, np.array([0, 1, 4, 8, 9, 10, 11])], atol=1e-6)
    np.testing.assert_allclose(whole[:, :4], hidden(features.at[:, 6:].set(9.0), (4, 4, 4))[:, :4], atol=1e-6)
    changed = hidden(features.at[:, 5].set(9.0), (4, 4, 4))
    assert (np.abs(whole - changed)[:, :4].max(axis=(0, 2)) > 1e-3).all()
