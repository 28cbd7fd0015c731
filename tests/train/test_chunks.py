"""The loss in chunks of anchors is the loss at once; the expected accepted length by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.data.packing import BlockPlan, sample_anchors
from dspark_jax.targets import Target
from dspark_jax.train.config import DrafterShape, LossConfig, OptimConfig, drafter_config
from dspark_jax.train.objective import Frozen, acceptance, blocks, expected_length, loss, prepare
from dspark_jax.train.step import init_state, make_train_step
from dspark_jax.train.warm_start import initial_params
from tests.train import tiny_run


@pytest.mark.slow
def test_chunks_change_neither_loss_nor_gradient_nor_acceptance() -> None:
    """Two chunks of a plan of four blocks, a recurrent head (whose state runs along a block), a trimmed vocabulary: the
    three terms, the expected length, every gradient and every slot's acceptance to 1e-5."""
    target = tiny_run.target()
    shape = DrafterShape(1, (0,), 1, block_size=3, markov_rank=4, markov_head="rnn", draft_vocab=20)
    config = drafter_config(shape, target.config)
    frozen = Frozen.build(target, np.arange(2, 22))
    params = initial_params(target, config, jax.random.key(1), copy_layers=(1,))
    params["confidence"] = jax.tree.map(lambda x: x + 0.1, params["confidence"])
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 3, 23)
    learnt = jnp.arange(20)[None, :] >= jnp.array([[4], [9]])
    plan = BlockPlan((3, 1, 3, 1))

    def run(params: Any, chunks: int) -> Any:
        lesson = prepare(config, frozen, tokens, learnt, chunks)
        slots = blocks(config, plan, lesson, *sample_anchors(jax.random.key(3), learnt, 4))
        value, length = loss(config, LossConfig(chunks=chunks), frozen, plan, params, lesson, slots)
        shown = acceptance(config, frozen, plan, params, lesson, slots, chunks)
        return value.total, (value, length, shown)

    results = [jax.jit(jax.value_and_grad(run, has_aux=True), static_argnums=1)(params, chunks) for chunks in (0, 2)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    gradients = jax.tree.leaves(results[0][1])
    assert all(np.abs(g).max() > 0 for g in gradients)


@pytest.mark.slow
def test_logits_of_a_large_vocabulary_exist_for_one_part_at_a_time() -> None:
    """150,000 words and 512 blocks of 7: one array of all logits takes 2.15 GB. The step in 32 parts needs less than
    half of that for everything, as the compiled program says; all at once it needs several such arrays."""
    layer = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
    decoder = DecoderConfig("llama", 150_000, 16, 32, 2, (layer, layer), tie_embeddings=True, max_positions=1024)
    target = Target.random(decoder, jax.random.key(0))
    config = drafter_config(DrafterShape(1, (0,), 1, block_size=7, markov_rank=4), decoder)
    frozen, plan = Frozen.build(target, None), BlockPlan((7,) * 512)
    state = init_state(initial_params(target, config, jax.random.key(1)), OptimConfig(), 0)
    text = jax.ShapeDtypeStruct((1, 520), jnp.int32), jax.ShapeDtypeStruct((1, 520), jnp.bool_)
    needed = []
    for chunks in (0, 32):
        step: Any = make_train_step(config, plan, 1, LossConfig(chunks=chunks), OptimConfig())
        exe = step.lower(state, frozen, *text, jax.ShapeDtypeStruct((), jnp.float32)).compile()
        needed.append(exe.memory_analysis().temp_size_in_bytes)
    logits = 512 * 7 * 150_000 * 4
    assert needed[0] > 2 * logits and needed[1] < logits / 2


def test_bfloat16_products_leave_state_and_gradient_in_float32() -> None:
    """One update of a tiny drafter: the gradient's length and the loss are float32's to 3 %, weights and both moments
    stay float32 and are not rounded to bfloat16."""
    target = tiny_run.target()
    config = drafter_config(DrafterShape(1, (0,), 1, block_size=3, markov_rank=4), target.config)
    frozen = Frozen.build(target, None)
    params = initial_params(target, config, jax.random.key(1), copy_layers=(1,))
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 3, 23)
    learnt = jnp.arange(20)[None, :] >= jnp.array([[4], [9]])
    found = []
    for settings in (LossConfig(), LossConfig(bfloat16=True)):
        step = make_train_step(config, BlockPlan((3, 3)), 1, settings, OptimConfig())
        state = init_state(jax.tree.map(jnp.copy, params), OptimConfig(), 0)
        state, metrics = step(state, frozen, tokens, learnt, jnp.float32(1e-3))
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        found.append((float(metrics["total"][0]), float(metrics["grad_norm"][0])))
        moments = np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.opt_state) if x.ndim])
        assert np.mean(moments != moments.astype(jnp.bfloat16)) > 0.5
    assert found[0] != found[1]
    np.testing.assert_allclose(*found, rtol=3e-2)


@pytest.mark.parametrize("chunks", [0, 2])
def test_rows_of_a_head_beyond_the_tokenizer_are_no_part_of_the_loss(chunks: int) -> None:
    """Heads are often padded (Qwen3). Loss, length, acceptance and gradients of a target whose last two rows no token
    has are those of a target without these rows; W2's last two rows get no gradient."""
    padded = tiny_run.target().replace(vocab_limit=22)
    params = {**padded.params, "embed_tokens": padded.params["embed_tokens"][:22]}
    cut = Target.build(params, dataclasses.replace(padded.config, vocab_size=22), scan=False, fuse=False)
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 3, 22)
    learnt = jnp.arange(20)[None, :] >= jnp.array([[4], [9]])
    plan, shape = BlockPlan((3, 1, 3, 1)), DrafterShape(1, (0,), 1, block_size=3, markov_rank=4)
    config = drafter_config(shape, padded.config)
    params = initial_params(padded, config, jax.random.key(1), copy_layers=(1,))
    keys = iter(jax.random.split(jax.random.key(4), 9))
    head = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params["markov"])
    params = {**params, "markov": head}

    def run(target: Target, params: Any) -> Any:
        config, frozen = drafter_config(shape, target.config), Frozen.build(target, None)

        def total(params: Any) -> Any:
            lesson = prepare(config, frozen, tokens, learnt, chunks)
            slots = blocks(config, plan, lesson, *sample_anchors(jax.random.key(3), learnt, 4))
            value, length = loss(config, LossConfig(chunks=chunks), frozen, plan, params, lesson, slots)
            return value.total, (value, length, acceptance(config, frozen, plan, params, lesson, slots, chunks))

        return jax.value_and_grad(total, has_aux=True)(params)

    def rows(markov: Any) -> Any:
        return {name: x[:22] for name, x in markov.items()}

    (found, gradient), wanted = run(padded, params), run(cut, {**params, "markov": rows(head)})
    assert not np.any(gradient["markov"]["w2"][22:]) and np.any(gradient["markov"]["w2"][:22])
    found = found, {**gradient, "markov": rows(gradient["markov"])}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_chunks_must_have_equal_widths() -> None:
    assert BlockPlan((3, 1, 3, 1)).part(2) == BlockPlan((3, 1))
    for parts in (3, 4, 0):
        with pytest.raises(ValueError, match=f"4 blocks do not fall into {parts} parts"):
            BlockPlan((3, 1, 3, 1)).part(parts)
    assert [BlockPlan((3, 1) * 4).most_parts(n) for n in (1, 2, 3, 4, 8, 99)] == [1, 2, 2, 4, 4, 4]
    assert BlockPlan((7, 5, 3) * 53 + (7,)).most_parts(2) == 1  # 160 blocks of a pattern of three
    with pytest.raises(ValueError, match="chunks of 0 or more"):
        dataclasses.replace(LossConfig(), chunks=-1)


def test_the_expected_length_is_the_product_form_over_whole_blocks_of_the_widest_width() -> None:
    """Blocks of 2, 1, 2: 1 + 0.5 + 0.25, the narrow one is left out, the last one is not whole."""
    rate = jnp.array([[0.5, 0.5, 0.9, 1.0, 1.0]])
    mask = jnp.array([[True, True, True, True, False]])
    total, count = expected_length(BlockPlan((2, 1, 2)), rate, mask)
    assert (float(total), float(count)) == (1.75, 1.0)
