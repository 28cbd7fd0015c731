"""The packed forward against the reference's training step, and against what decoding computes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, pack
from dspark_jax.drafters.base import SharedParams
from dspark_jax.drafters.dspark import Drafter, drafter_specs
from dspark_jax.layout import dense_layout
from dspark_jax.params import is_spec
from dspark_jax.train.block_forward import packed_heads, packed_hidden
from dspark_jax.train.loss import Loss, dspark_loss
from tests.drafted import block_logits
from tests.train.oracle_case import CASES, Case, load_case


def _forward(case: Case, params: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    shape = case.train["eval_mask"].shape
    features = jnp.asarray(case.train["target_hidden_states"])
    hidden = packed_hidden(case.config, params, case.shared, features, case.plan, case.slots)
    logits, confidence = packed_heads(case.config, params, case.shared, case.plan, case.slots, hidden)
    if confidence is not None:
        confidence = confidence.reshape(shape)
    return hidden.reshape(*shape, -1), logits.reshape(*shape, -1), confidence


@pytest.mark.parametrize("name", CASES)
def test_states_logits_and_masks_equal_the_reference(name: str) -> None:
    case = load_case(name)
    seen = case.train["eval_mask"]
    np.testing.assert_array_equal(np.asarray(case.slots.mask).reshape(seen.shape), seen)
    labels = np.asarray(case.slots.labels).reshape(seen.shape)
    np.testing.assert_array_equal(labels[seen], case.train["target_ids"][seen])
    hidden, logits, confidence = jax.jit(partial(_forward, case))(case.params)
    close = partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)
    close(np.asarray(hidden)[seen], case.train["block_hidden"][seen])
    close(np.asarray(logits)[seen], case.train["draft_logits"][seen])
    if confidence is not None:
        close(np.asarray(confidence)[seen], case.train["confidence_pred"][seen])


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference(name: str) -> None:
    """Norms of all parameters, entries of those that the oracle stores."""
    case = load_case(name)

    def total(params: Any) -> jax.Array:
        _, logits, confidence = _forward(case, params)
        loss: Loss = dspark_loss(
            logits,
            jnp.asarray(case.train["aligned_target_logits"]),
            jnp.asarray(case.train["target_ids"]),
            confidence,
            jnp.asarray(case.train["eval_mask"]),
            weights=tuple(float(a) for a in case.train["alphas"]),  # type: ignore[arg-type]
            decay=float(case.train["loss_decay_gamma"]),
        )
        return loss.total

    gradient = jax.tree.leaves(jax.jit(jax.grad(total))(case.params))
    specs = jax.tree.leaves(drafter_specs(case.config), is_leaf=is_spec)
    named = {spec.name: np.asarray(g) for spec, g in zip(specs, gradient, strict=True)}
    for key, norm in zip(case.train["grad_norm_names"], case.train["grad_norms"], strict=True):
        np.testing.assert_allclose(np.linalg.norm(named[str(key)]), norm, rtol=1e-3, err_msg=str(key))
    stored = [key for key in case.train if key.startswith("grad.")]
    assert stored
    for key in stored:
        expected = case.train[key]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(named[key.removeprefix("grad.")], expected, atol=1e-3 * scale, err_msg=key)


def _tiny(widths: tuple[int, ...], window: int = 0) -> tuple[DrafterConfig, Drafter, jax.Array]:
    case = load_case("qwen3_dspark_rnn")
    config = dataclasses.replace(case.config, block_widths=widths)
    if window:
        layers = tuple(dataclasses.replace(layer, window=window) for layer in config.decoder.layers)
        config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, layers=layers))
    drafter = Drafter.build(case.params, config, embed=case.shared.embed, head=case.shared.head)
    return config, drafter, jnp.asarray(case.train["target_hidden_states"][:1])


class _Forced:
    """A sampler that draws the text's own tokens, so that decoding walks the teacher-forced path."""

    def __init__(self, tokens: jax.Array) -> None:
        self.tokens = tokens

    def start(self) -> jax.Array:
        return jnp.zeros(())

    def numbers(self, places: int) -> None:
        return None

    def draw(self, state: Any, logits: jax.Array, k: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        token = self.tokens[:, k]
        return token, token, jnp.max(logits, axis=-1), state


@pytest.mark.parametrize(("widths", "window"), [((3, 7, 1, 5, 2, 6, 4), 0), ((7, 2), 6)])
def test_every_width_equals_decoding_at_that_width(widths: tuple[int, ...], window: int) -> None:
    """Blocks of widths 1 to 7, packed together, give the logits ``propose`` gives for each alone.

    Decoding draws the text's own tokens. The window is the one of sliding-window drafters, in context and block.
    """
    config, drafter, features = _tiny(tuple(sorted(widths)), window)
    length = features.shape[1]
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, config.decoder.vocab_size)
    anchors = jnp.array([[5, 20, 0, 33, 11, 40, 2][: len(widths)]], jnp.int32)
    layout = dense_layout(jnp.zeros(1, jnp.int32), jnp.full(1, length), length)

    @jax.jit
    def packed(features: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        plan = BlockPlan(widths)
        keep, learnt = jnp.ones((1, len(widths)), bool), jnp.ones((1, length), bool)
        slots = pack(plan, anchors, keep, tokens, learnt, config.mask_token_id)
        hidden = packed_hidden(config, drafter.params, drafter.shared, features, plan, slots)
        return packed_heads(config, drafter.params, drafter.shared, plan, slots, hidden)

    @jax.jit
    def decoded(features: jax.Array) -> list[tuple[jax.Array, jax.Array | None]]:
        state = drafter.absorb(
            drafter.init(1, length + 8), features.reshape(length, -1), layout, tokens[0], layout.count
        )
        blocks = []
        for i, width in enumerate(widths):
            ahead = jnp.arange(width) + anchors[0, i] + 1
            sampler = _Forced(tokens.at[:, ahead].get(mode="fill", fill_value=0))
            block = drafter.propose(state, tokens[:, anchors[0, i]], anchors[:, i], width, sampler)
            blocks.append((block_logits(drafter, block), block.confidence_logits))
        return blocks

    logits, confidence = packed(features)
    assert confidence is not None
    begin = 0
    for width, (decoded_logits, decoded_confidence) in zip(widths, decoded(features), strict=True):
        inside = slice(begin, begin + width)
        np.testing.assert_allclose(logits[:, inside], decoded_logits, atol=2e-5)
        np.testing.assert_allclose(confidence[:, inside], decoded_confidence, atol=2e-5)
        begin += width


def test_a_slot_reads_nothing_at_or_behind_its_anchor() -> None:
    """Features from the anchor on, and other blocks, leave a block's states as they are."""
    config, drafter, features = _tiny(())
    length = features.shape[1]
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, config.decoder.vocab_size)
    plan = BlockPlan((7, 7))

    @jax.jit
    def states(features: jax.Array, second: int) -> jax.Array:
        anchors = jnp.stack([jnp.asarray(12), jnp.asarray(second)])[None].astype(jnp.int32)
        slots = pack(plan, anchors, jnp.ones((1, 2), bool), tokens, jnp.ones((1, length), bool), config.mask_token_id)
        shared: SharedParams = drafter.shared
        return packed_hidden(config, drafter.params, shared, features, plan, slots)[:, :7]

    changed = features.at[:, 12:].set(9.0)
    np.testing.assert_allclose(states(features, 20), states(changed, 14), atol=1e-6)
    assert np.abs(states(features, 20) - states(features.at[:, 11].set(9.0), 20)).max() > 1e-3
