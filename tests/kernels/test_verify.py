"""Fused verification: every backend's pass over the logits against the reference, the whole against the library."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise as library_noise
from dspark_jax import verify as library
from dspark_jax.layout import ragged_layout
from dspark_jax.noise import ACCEPT, RESIDUAL
from pallas_kernels.dispatch import BackendError
from pallas_kernels.verify import Requests, Rows, RowStatistics, row_statistics, verify
from tests.kernels import interpreters

REQUESTS, DRAFTS, VOCAB = 24, 3, 40


def random_rows(count: int, vocab: int, dtype: Any = jnp.float32) -> Rows:
    """Noise in every second row, no drafted token in some, one column masked out by -inf."""
    keys = iter(jax.random.split(jax.random.key(count + vocab), 8))
    logits = (2 * jax.random.normal(next(keys), (count, vocab))).at[:, 7].set(-jnp.inf)
    token = jax.random.randint(next(keys), (count,), -1, vocab)
    return Rows(
        logits=logits.astype(dtype),
        inverse=1 / jnp.linspace(0.5, 1.5, count),
        noisy=(jnp.arange(count) % 2).astype(jnp.float32),
        word0=jax.random.bits(next(keys), (count,), jnp.uint32),
        word1=jax.random.bits(next(keys), (count,), jnp.uint32),
        token=jnp.where(token == 7, 8, token),
    )


def statistics(rows: Rows, implementation: str = "xla", interpret: Any = None) -> RowStatistics:
    return jax.jit(partial(row_statistics, implementation=implementation, interpret=interpret))(rows)


def assert_same(rows: Rows, got: RowStatistics) -> None:
    want = statistics(rows)
    np.testing.assert_array_equal(got.choice, want.choice)
    np.testing.assert_allclose(got.lse, want.lse, atol=2e-6)
    drafted = np.asarray(rows.token) >= 0
    assert drafted.any()
    np.testing.assert_allclose(np.asarray(got.log_p)[drafted], np.asarray(want.log_p)[drafted], atol=2e-6)


@pytest.mark.parametrize(("count", "vocab"), [(8, 2048), (16, 2500), (8, 300)])
def test_tpu_rows_equal_the_reference_in_the_interpreter(count: int, vocab: int) -> None:
    """Tiles of 2048 columns: one whole, one and a part, a part of one."""
    rows = random_rows(count, vocab)
    got = statistics(rows, "tpu", interpreters.tpu())
    interpreters.no_race_on_tpu()
    assert_same(rows, got)


@pytest.mark.parametrize(
    ("count", "vocab", "dtype"),
    [(16, 300, jnp.float32), pytest.param(70, 256, jnp.bfloat16, marks=pytest.mark.slow)],
)
def test_mosaic_gpu_rows_equal_the_reference_in_the_interpreter(count: int, vocab: int, dtype: Any) -> None:
    """Tiles of 64 rows and 128 columns, whole and padded."""
    interpret = interpreters.mosaic_gpu()
    rows = random_rows(count, vocab, dtype)
    got = statistics(rows, "mosaic_gpu", interpret)
    interpreters.no_race_on_gpu()
    assert_same(rows, got)


def test_outcome_is_the_librarys_for_both_rules_and_every_admission() -> None:
    """The library keeps all rows of log p and log q; here one row a request is rebuilt. Same numbers, same tokens.

    Drafts are likely ones, so every number of accepted drafts occurs in both rules."""
    rng = np.random.default_rng(3)
    logits_p = rng.normal(size=(REQUESTS, DRAFTS + 1, VOCAB)).astype(np.float32)
    log_q = jax.nn.log_softmax(jnp.asarray(logits_p[:, :DRAFTS] + 0.5 * rng.normal(size=(REQUESTS, DRAFTS, VOCAB))))
    log_q = log_q.astype(jnp.float32)
    temperature = np.where(np.arange(REQUESTS) % 4 == 0, 0.0, 0.8).astype(np.float32)
    greedy = jnp.asarray(temperature < 1e-5)
    coupled = jnp.asarray(np.arange(REQUESTS) % 3 == 0)
    admitted = jnp.asarray(np.arange(REQUESTS) % (DRAFTS + 1), jnp.int32)
    inverse = np.where(temperature < 1e-5, 1.0, 1 / np.maximum(temperature, 1e-5)).astype(np.float32)
    x = jnp.asarray(logits_p * inverse[:, None, None])
    tokens = jnp.argmax(x[:, :DRAFTS] + 0.7 * jnp.asarray(rng.gumbel(size=log_q.shape)), axis=-1).astype(jnp.int32)

    length = jnp.asarray(rng.integers(5, 50, REQUESTS), jnp.int32)
    keys = library.RowKeys(
        jnp.arange(REQUESTS, dtype=jnp.uint32) + 9, jnp.full(REQUESTS, 3, jnp.int32), length, coupled, greedy
    )
    layout = ragged_layout(length, admitted + 1, DRAFTS + 1, REQUESTS * (DRAFTS + 1))
    flat = layout.flatten(x)
    best = jax.nn.one_hot(jnp.argmax(flat, axis=-1), VOCAB)
    log_p = jnp.where(greedy[layout.row][:, None], jnp.log(best), jax.nn.log_softmax(flat, axis=-1))
    # Rows that decide by their own choice would hardly ever accept such drafts: their first one is that choice.
    own = layout.pad(library.choose(log_p, layout, keys, library_noise.HASH_NOISE))
    tokens = tokens.at[:, 0].set(jnp.where(coupled | greedy, own[:, 0], tokens[:, 0]))
    one_hot_q = jnp.log(jax.nn.one_hot(jnp.argmax(log_q, axis=-1), VOCAB))
    q = jnp.where(greedy[:, None, None], one_hot_q, log_q)
    q_at = jnp.take_along_axis(q, tokens[..., None], axis=-1)[..., 0]

    def q_row(place: jax.Array) -> jax.Array:
        return q[jnp.arange(REQUESTS), place]

    want = library.verify(log_p, layout, library.Drafts(tokens, q_at), admitted, keys, library_noise.HASH_NOISE, q_row)

    plain = library_noise.key_words(library.plain_key(keys, layout.row, layout.offset))
    drafted = jnp.concatenate([tokens, jnp.full((REQUESTS, 1), -1, jnp.int32)], axis=1)
    decide = coupled | greedy
    rows = Rows(
        layout.flatten(jnp.asarray(logits_p)),
        jnp.asarray(inverse)[layout.row],
        (coupled & ~greedy)[layout.row].astype(jnp.float32),
        *plain,
        layout.flatten(drafted),
    )

    def words(places: int, purpose: int) -> list[jax.Array]:
        columns = [
            library_noise.key_words(library.cycle_key(keys, jnp.full(REQUESTS, k), purpose)) for k in range(places)
        ]
        return [jnp.stack([c[i] for c in columns], axis=1) for i in range(2)]

    requests = Requests(
        layout.index, tokens, q_at, admitted, decide, *words(DRAFTS, ACCEPT), *words(DRAFTS + 1, RESIDUAL)
    )
    got = jax.jit(lambda a, b, q: verify(a, b, lambda place: q[jnp.arange(REQUESTS), place], implementation="xla"))(
        rows, requests, q
    )
    np.testing.assert_array_equal(got.accepted, want.accepted)
    np.testing.assert_array_equal(got.next_token, want.next_token)
    for rule in (np.asarray(decide), ~np.asarray(decide)):
        assert {0, 1}.issubset(np.asarray(got.accepted)[rule])
    assert (np.asarray(got.accepted) < np.asarray(admitted))[~np.asarray(decide)].any()  # some draw is from a residual


def test_naming_a_backend_means_that_one_or_an_error_with_the_reason() -> None:
    with pytest.raises(BackendError, match="needs a tpu device"):
        row_statistics(random_rows(8, 300), implementation="tpu")
    with pytest.raises(BackendError, match="there are 12 rows"):
        row_statistics(random_rows(12, 300), implementation="tpu", aot=True)
    with pytest.raises(BackendError, match="logits are float16"):
        row_statistics(random_rows(8, 300, jnp.float16), implementation="mosaic_gpu", aot=True)
