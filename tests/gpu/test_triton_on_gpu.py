"""The Triton kernels on a card, against the reference on the same card."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from tests.kernels import test_markov_sample, test_verify

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def card() -> None:
    reason = triton_call.missing()
    if reason is not None:
        pytest.skip(reason)
    if float(jax.devices()[0].compute_capability) >= 10:
        pytest.skip("the Triton kernels are for cards from Ampere to Hopper")


@pytest.mark.parametrize("kind", test_markov_sample.KINDS)
@pytest.mark.parametrize(("rows", "vocab"), [(5, 300), (70, 3000)])
def test_head_draws_the_references_tokens(kind: str, rows: int, vocab: int) -> None:
    """Log-probabilities to 1e-4: tensor cores add the products in another order."""
    head, block = test_markov_sample.case(kind, rows=rows, vocab=vocab)
    got, want = (test_markov_sample.sample(head, block, name) for name in ("triton", "xla"))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for name in ("log_q", "lse"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-4, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_are_the_references(dtype: jnp.dtype) -> None:
    rows = test_verify.random_rows(37, 3000, dtype)
    got, want = (test_verify.statistics(rows, name) for name in ("triton", "xla"))
    np.testing.assert_array_equal(got.choice, want.choice)
    np.testing.assert_allclose(got.lse, want.lse, atol=1e-4)
    drafted = np.asarray(rows.token) >= 0
    np.testing.assert_allclose(np.asarray(got.log_p)[drafted], np.asarray(want.log_p)[drafted], atol=1e-4)
