"""The teacher's probabilities, where a drafter begins, and the summary of held-out acceptance."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.data.packing import BlockPlan
from dspark_jax.data.records import Records, write_records
from dspark_jax.targets import Target
from dspark_jax.train import warm_start
from dspark_jax.train.heldout import summary
from dspark_jax.train.teacher import TeacherHead, teacher_states

LAYER = LayerConfig(num_kv_heads=1, head_dim=8, rope=RopeConfig())
CONFIG = DecoderConfig("llama", 24, 16, 32, 2, (LAYER,) * 3, tie_embeddings=True, max_positions=64)


def test_the_split_head_gives_the_targets_probabilities() -> None:
    target = Target.random(CONFIG, jax.random.key(0))
    d2t = np.array([1, 4, 7, 20], np.int32)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 24)
    final, features = teacher_states(target, tokens, (0, 2))
    assert final.shape == (2, 9, 16) and features.shape == (2, 9, 32)
    p = jax.nn.softmax(target.unembed(final.reshape(18, 16) * 9), axis=-1)
    inside, outside, top = TeacherHead.build(target, d2t)(final.reshape(18, 16) * 9)
    assert outside is not None
    np.testing.assert_allclose(inside, p[:, d2t], rtol=1e-5)
    np.testing.assert_allclose(outside, 1 - p[:, d2t].sum(1), rtol=1e-5)
    np.testing.assert_array_equal(top, np.isin(p.argmax(1), d2t))
    whole, none, _ = TeacherHead.build(target, None)(final.reshape(18, 16) * 9)
    assert none is None
    np.testing.assert_allclose(whole, p, rtol=1e-5)


def test_a_copied_drafter_begins_as_the_targets_last_layers() -> None:
    target = Target.random(CONFIG, jax.random.key(0), fuse=False)
    decoder = DecoderConfig(**{**vars(CONFIG), "layers": (LAYER,) * 2})
    config = DrafterConfig("dspark", decoder, 3, (0, 1), 1, markov_rank=4, confidence_head=True)
    params = warm_start.initial_params(target, config, jax.random.key(1), copy_layers=(1, 2), output_scale=0.5)
    ours = params["layers"][1]["mlp"]["up_proj"]
    np.testing.assert_array_equal(ours, target.params["layers"][2]["mlp"]["up_proj"])
    # The projection passes the last tap on.
    x = jnp.arange(32.0)
    np.testing.assert_array_equal(params["fc"] @ x, x[16:])
    np.testing.assert_array_equal(params["norm"], 0.5 * target.params["norm"])
    assert not params["confidence"]["proj"].any()


def test_a_copied_chain_begins_as_one_of_the_targets_layers() -> None:
    """EAGLE-3's attention reads the copied layer's input in its second half; MTP's pair begins as its mean."""
    target = Target.random(CONFIG, jax.random.key(0), fuse=False)
    decoder, copied = DecoderConfig(**{**vars(CONFIG), "layers": (LAYER,)}), target.params["layers"][2]
    eagle3 = warm_start.initial_params(
        target, DrafterConfig("eagle3", decoder, 3, (0, 1)), jax.random.key(1), copy_layers=(2,), output_scale=0.5
    )
    layer, x = eagle3["layers"][0], jnp.arange(32.0)
    np.testing.assert_array_equal(layer["attn"]["k_proj"][:, 16:], copied["attn"]["k_proj"])
    assert np.abs(layer["attn"]["k_proj"][:, :16]).min() > 0
    np.testing.assert_array_equal(layer["attn"]["o_proj"], copied["attn"]["o_proj"])
    np.testing.assert_array_equal(layer["hidden_norm"], copied["input_layernorm"])
    np.testing.assert_array_equal(layer["mlp"]["up_proj"], copied["mlp"]["up_proj"])
    np.testing.assert_array_equal(eagle3["fc"] @ x, x[16:])
    np.testing.assert_array_equal(eagle3["norm"], 0.5 * target.params["norm"])
    mtp = warm_start.initial_params(target, DrafterConfig("mtp", decoder, 3, (2,)), jax.random.key(1), copy_layers=(2,))
    np.testing.assert_array_equal(mtp["layers"][0]["attn"]["q_proj"], copied["attn"]["q_proj"])
    np.testing.assert_array_equal(mtp["fc"] @ x, (x[:16] + x[16:]) / 2)


def test_the_draft_vocabulary_is_sorted_and_keeps_what_it_must(tmp_path: Path) -> None:
    """Tokens 9, 9, 5 are learnt, 8 is a prompt's; 2 belongs to it whatever its count."""
    write_records(tmp_path, [([8, 8, 8, 9, 9, 5], [False] * 3 + [True] * 3)], vocab_size=12)
    found = warm_start.draft_vocabulary(Records(tmp_path), 3, 12, always=(2,))
    assert found.tolist() == [2, 5, 9] and found.dtype == np.int32
    beyond, few = r"always: \[9\] are beyond the 9 tokens", "draft_vocab = 10, but only 9"
    for size, always, what in ((3, (9,), beyond), (10, (), few)):
        with pytest.raises(ValueError, match=what):
            warm_start.draft_vocabulary(Records(tmp_path), size, 9, always)
    assert warm_start.draft_vocabulary(Records(tmp_path), 9, 9).tolist() == list(range(9))  # 9 is no longer counted


def test_svd_finds_a_matrix_of_low_rank() -> None:
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((40, 3)) @ rng.standard_normal((3, 30))).astype(np.float32)
    a, b = warm_start.truncated_svd(matrix, 3, seed=0)
    np.testing.assert_allclose(a @ b.T, matrix, atol=1e-4)


def test_a_bigram_start_knows_the_texts_bigrams(tmp_path: Path) -> None:
    """A text that counts upwards: after each token its successor is the most probable."""
    ids = [3 + i % 9 for i in range(400)]
    write_records(tmp_path, [(ids, [True] * 400)], vocab_size=16)
    d2t = np.arange(3, 12, dtype=np.int32)
    w1, w2 = warm_start.bigram_factors(Records(tmp_path), d2t, 16, 4, steps=200, prior=0.1)
    assert w1.shape == (16, 4) and w2.shape == (9, 4) and not w1[:3].any()
    assert (w1[d2t] @ w2.T).argmax(1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_tau_is_one_plus_the_products_of_acceptance() -> None:
    """Two blocks of width 2 and one of width 1; the second block ends early and is left out."""
    plan = BlockPlan((2, 1, 2))
    rate = np.array([[0.5, 0.5, 0.25, 0.9, 0.9]])
    agree = np.array([[1.0, 0.0, 1.0, 0.0, 0.0]])
    mask = np.array([[True, True, True, True, False]])
    found = summary(plan, rate=rate, agree=agree, confidence=rate, mask=mask)
    assert found["width_2"]["blocks"] == 1
    assert found["width_2"]["tau"] == 1.75 and found["width_2"]["greedy"] == 2.0
    assert found["width_2"]["accept"] == [0.5, 0.5] == found["width_2"]["confidence"]
    assert found["width_1"]["tau"] == 1.25


def test_text_that_is_read_is_that_of_its_records_alone(tmp_path: Path) -> None:
    """Records 0 and 2, cut to three tokens: 4 follows 3 and 5 follows 4 once each; 9 is a record's first token and
    follows nothing, 6 was cut off, and record 1 was not asked for."""
    texts = [[3, 4, 5, 6], [7, 8], [9, 4]]
    write_records(tmp_path, [(ids, [True] * len(ids)) for ids in texts], vocab_size=12)
    text = warm_start.joined(Records(tmp_path), np.array([0, 2]), 3)
    every = np.arange(12, dtype=np.int32)
    counts = warm_start.bigram_counts(text, every, every, 12)
    assert {(int(a), int(b)) for a, b in np.argwhere(counts)} == {(3, 4), (4, 5), (9, 4)} and counts.sum() == 3
