"""The sequential head as one operation: every backend against the reference, the reference against the library."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise as library_noise
from dspark_jax.config import DrafterConfig
from dspark_jax.heads.markov import markov_bias, markov_hidden
from pallas_kernels import noise
from pallas_kernels.dispatch import BackendError
from pallas_kernels.markov_sample import Block, Head, Sampled, markov_sample, row_log_q
from tests.kernels import interpreters

KINDS = ("vanilla", "gated", "rnn")


def case(
    kind: str = "vanilla", *, places: int = 3, rows: int = 8, vocab: int = 300, rank: int = 128, trimmed: bool = True
) -> tuple[Head, Block]:
    """bfloat16 inputs; every third row is greedy, one column is masked out by -inf."""
    target_vocab, hidden = vocab + 150 if trimmed else vocab, 32
    keys = iter(jax.random.split(jax.random.key(places * 1000 + vocab), 20))

    def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(dtype)

    extra: dict[str, jax.Array] = {}
    if kind == "gated":
        extra = {"gate": normal(rank, hidden + rank, scale=0.2), "gate_bias": normal(rank)}
    if kind == "rnn":
        extra = {"joint": normal(3 * rank, 2 * rank + hidden, scale=0.2), "joint_bias": normal(3 * rank)}
    head = Head(
        normal(target_vocab, rank, scale=0.3), normal(vocab, rank, scale=0.3), **extra,
        confidence=normal(1, hidden + rank), confidence_bias=normal(1),
    )  # fmt: skip
    ids = None
    if trimmed:
        ids = jnp.sort(jax.random.permutation(next(keys), target_vocab)[:vocab]).astype(jnp.int32)
    words = [jax.random.bits(next(keys), (places, rows), jnp.uint32) for _ in range(2)]
    block = Block(
        base=normal(places, rows, vocab, scale=2.0).at[:, :, 5].set(-jnp.inf),
        hidden=normal(places, rows, hidden),
        anchor=jnp.arange(rows, dtype=jnp.int32) * 7,
        temperature=jnp.where(jnp.arange(rows) % 3 == 0, 0.0, 0.5 + 0.1 * jnp.arange(rows)).astype(jnp.float32),
        word0=words[0], word1=words[1], ids=ids,
    )  # fmt: skip
    return head, block


def sample(head: Head, block: Block, implementation: str = "xla", interpret: Any = None) -> Sampled:
    return jax.jit(partial(markov_sample, implementation=implementation, interpret=interpret))(head, block)


def assert_same(got: Sampled, want: Sampled) -> None:
    """Tokens equal, floats to 2e-6: both add the same bfloat16 products in float32."""
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.column, want.column)
    for name in ("log_q", "lse", "confidence"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=2e-6, rtol=2e-6, err_msg=name)


def test_noise_is_the_librarys_bit_for_bit() -> None:
    """A kernel and the decoding cycle must see the same numbers; Gumbel values may differ by 4e-6 (DESIGN 3)."""
    count = 5000
    keys = jax.random.split(jax.random.key(0), 4)
    words = [jax.random.bits(k, (2,), jnp.uint32) for k in keys[:2]]
    key = library_noise.NoiseKey(*[jnp.arange(2, dtype=jnp.int32) + 3 * i for i in range(4)])
    words = library_noise.key_words(key)
    ids = jax.random.permutation(keys[2], 152_000)[:count].astype(jnp.int32)
    want = library_noise.row_bits(key, ids)
    got = noise.bits(words[0][:, None], words[1][:, None], ids[None, :])
    np.testing.assert_array_equal(got, want)
    edges = jnp.asarray([[0, 1, 2, 127, 255, 256, 2**31, 2**32 - 1, 2**32 - 128, 2**24 - 1]], jnp.uint32)
    for h in (want, edges):
        value = noise.gumbel(h)
        assert np.isfinite(value).all()
        np.testing.assert_allclose(value, library_noise.gumbel(h, jnp.dtype(jnp.float32)), atol=4e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_draws_what_the_librarys_head_and_noise_draw(kind: str) -> None:
    """Place by place with the library's own functions in float32."""
    head, block = case(kind)
    head, block = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (head, block))
    got = sample(head, block)
    config = DrafterConfig.__new__(DrafterConfig)  # only the kind of head is read
    object.__setattr__(config, "markov_head", kind)
    params = {"w1": head.w1, "w2": head.w2, "gate": head.gate, "gate_bias": head.gate_bias}
    params |= {"joint": head.joint, "joint_bias": head.joint_bias}
    previous, state = block.anchor, jnp.zeros((8, 128))
    greedy = block.temperature < 1e-5
    for k in range(3):
        z, state = markov_hidden(config, params, state, head.w1[previous], block.hidden[k])  # type: ignore[index]
        logits = block.base[k] + markov_bias(params, z)
        log_q = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, block.temperature)[:, None], axis=-1)
        h = noise.bits(block.word0[k][:, None], block.word1[k][:, None], block.ids[None, :])  # type: ignore[index]
        g = jnp.where(greedy[:, None], 0.0, library_noise.gumbel(h, jnp.dtype(jnp.float32)))
        index = jnp.argmax(log_q + g, axis=-1)
        np.testing.assert_array_equal(got.column[k], index)
        chosen = np.take_along_axis(np.asarray(log_q), np.asarray(index)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(got.log_q[k], np.where(greedy, 0.0, chosen), atol=1e-5)
        previous = block.ids[index]  # type: ignore[index]
        np.testing.assert_array_equal(got.tokens[k], previous)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rebuilt_row_is_the_distribution_its_token_was_drawn_from(kind: str) -> None:
    """Whole rows are needed only where a draft was rejected; they are probabilities and agree at the token, to a few
    roundings of float32 at logits of 10 (1e-6 each), which sums in another order add up to."""
    head, block = case(kind)
    out = sample(head, block)
    for k in range(3):
        row = np.asarray(row_log_q(head, block.base[k], out.z[k], out.lse[k], block.temperature))  # type: ignore[index]
        np.testing.assert_allclose(np.exp(row.astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)
        at_token = np.take_along_axis(row, np.asarray(out.column[k])[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(at_token, out.log_q[k], atol=1e-5)
        assert np.isneginf(row[:, 5]).all()


@pytest.mark.parametrize("vocab", [512, 700, 100])
def test_tpu_kernel_equals_the_reference_in_the_interpreter(vocab: int) -> None:
    """Tiles of 512: one whole, one and a part, a part of one; a trimmed vocabulary reads the noise by target id."""
    head, block = case(places=2, vocab=vocab)
    got = sample(head, block, "tpu", interpreters.tpu())
    interpreters.no_race_on_tpu()
    assert_same(got, sample(head, block))


@pytest.mark.parametrize(
    ("kind", "vocab", "rows"),
    [
        pytest.param("vanilla", 256, 64, marks=pytest.mark.slow),
        pytest.param("rnn", 300, 5, marks=pytest.mark.slow),
        ("vanilla", 100, 8),
    ],
)
def test_mosaic_gpu_kernel_equals_the_reference_in_the_interpreter(kind: str, vocab: int, rows: int) -> None:
    """Tiles of 128 columns and 64 rows, whole and padded."""
    interpret = interpreters.mosaic_gpu()
    head, block = case(kind, places=2, vocab=vocab, rows=rows, rank=64)
    got = sample(head, block, "mosaic_gpu", interpret)
    interpreters.no_race_on_gpu()
    assert_same(got, sample(head, block))


def test_naming_a_backend_means_that_one_or_an_error_with_the_reason() -> None:
    head, block = case()
    with pytest.raises(BackendError, match="needs a hopper device"):
        markov_sample(head, block, implementation="mosaic_gpu")
    with pytest.raises(BackendError, match="no backend 'cuda'; known: xla, mosaic_gpu, triton, tpu"):
        markov_sample(head, block, implementation="cuda")
    wide = head._replace(w2=jnp.zeros((300, 100), jnp.bfloat16))
    with pytest.raises(BackendError, match="rank is 100"):
        markov_sample(wide, block, implementation="tpu", aot=True)
    with pytest.raises(BackendError, match="no Markov head"):
        markov_sample(Head(None, None), block, implementation="mosaic_gpu", aot=True)


def test_without_a_head_the_base_logits_are_sampled() -> None:
    """DFlash: no W2, no state, no confidence."""
    _, block = case()
    out = sample(Head(None, None), block)
    assert out.z is None and out.confidence is None
    greedy = np.asarray(block.temperature < 1e-5)
    best = np.asarray(block.base.astype(jnp.float32)).argmax(axis=-1)
    np.testing.assert_array_equal(np.asarray(out.column)[:, greedy], best[:, greedy])
