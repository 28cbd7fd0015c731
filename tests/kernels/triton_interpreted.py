"""The Triton kernels in Triton's interpreter, against the reference. ``test_triton.py`` runs this file in a process of
its own: the interpreter takes over every kernel of a process that is started with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.cycle import Static
from pallas_kernels import noise
from pallas_kernels.triton_call import call
from tests.kernels import interpreters, test_in_cycle, test_markov_sample, test_verify


def test_noise_of_a_kernel_is_the_references() -> None:
    """The same numbers, so the same hash bits: one bit off would change a number by more than its own size. Gumbel
    values differ by rounding alone."""
    import triton
    import triton.language as tl

    from pallas_kernels import triton_noise

    globals()["tl"], globals()["triton_noise"] = tl, triton_noise  # a kernel looks names up where it was written

    @triton.jit
    def kernel(word0, word1, ids, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(out + at, triton_noise.gumbel(tl.load(word0 + at), tl.load(word1 + at), tl.load(ids + at)))

    rng = np.random.default_rng(0)
    words = [jnp.asarray(rng.integers(0, 2**32, 4096, dtype=np.uint32)) for _ in range(2)]
    ids = jnp.asarray(rng.permutation(152_000)[:4096].astype(np.int32))
    out = [jnp.zeros(4096, jnp.float32)]
    (got,) = call(kernel, (*words, ids), out, grid=(1,), warps=4, interpret=interpreters.triton(), SIZE=4096)  # type: ignore[arg-type]
    np.testing.assert_allclose(got, noise.gumbel(noise.bits(*words, ids)), atol=4e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "vocab", "rows", "rank", "trimmed"),
    [
        ("vanilla", 256, 8, 64, True),
        ("vanilla", 300, 70, 40, False),
        ("gated", 100, 5, 128, True),
        ("rnn", 129, 33, 64, False),
    ],
)
def test_head_equals_the_reference(kind: str, vocab: int, rows: int, rank: int, trimmed: bool) -> None:
    """Tiles of 128 columns and 16, 32 or 64 rows, whole and in parts; ranks that are no multiple of the depth."""
    head, block = test_markov_sample.case(kind, places=2, vocab=vocab, rows=rows, rank=rank, trimmed=trimmed)
    got = test_markov_sample.sample(head, block, "triton", interpreters.triton())
    test_markov_sample.assert_same(got, test_markov_sample.sample(head, block))


@pytest.mark.parametrize(("count", "vocab", "dtype"), [(8, 2048, jnp.bfloat16), (5, 1100, jnp.float32)])
def test_rows_equal_the_reference(count: int, vocab: int, dtype: Any) -> None:
    """Tiles of 1024 columns and 2 rows, whole and in parts."""
    rows = test_verify.random_rows(count, vocab, dtype)
    test_verify.assert_same(rows, test_verify.statistics(rows, "triton", interpreters.triton()))


def test_a_row_that_is_no_number_is_told_apart_from_its_neighbours() -> None:
    """NaN or infinity among the logits make the log-sum-exp no finite number; so does -inf everywhere (LOW)."""
    rows = test_verify.random_rows(6, 300)
    wrong = {1: jnp.nan, 3: jnp.inf}
    logits = rows.logits
    for row, value in wrong.items():
        logits = logits.at[row, 40].set(value)
    got = test_verify.statistics(rows._replace(logits=logits), "triton", interpreters.triton())
    assert np.isfinite(np.asarray(got.lse)).tolist() == [row not in wrong for row in range(6)]
    others = [row for row in range(6) if row not in wrong]
    want = test_verify.statistics(rows)
    np.testing.assert_array_equal(np.asarray(got.choice)[others], np.asarray(want.choice)[others])
    assert (np.asarray(got.choice) < 300).all()


def test_cycles_through_the_kernels_are_the_plain_cycles() -> None:
    """Drafts and verification from the kernels, both rules and temperature 0 in one batch."""
    target, drafter = test_in_cycle.models()
    w = {name: x.astype(jnp.bfloat16) if name in ("w1", "w2") else x for name, x in drafter.params["markov"].items()}
    drafter = drafter.replace(params={**drafter.params, "markov": w})
    found, plain = (
        test_in_cycle.run(target, drafter, test_in_cycle.opened(), static)
        for static in (Static(fused="triton", interpret=interpreters.triton()), Static(fused="xla"))
    )
    test_in_cycle.assert_same(found, plain)
