"""Row statistics in plain XLA: what every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import noise
from pallas_kernels.tiles import LOW
from pallas_kernels.verify.spec import Rows, RowStatistics


def row_statistics(rows: Rows) -> RowStatistics:
    """One pass over the logits, with the noise of every row."""
    x = jnp.maximum(rows.logits.astype(jnp.float32) * rows.inverse[:, None], LOW)
    ids = jnp.arange(x.shape[1], dtype=jnp.int32)[None, :]
    g = noise.gumbel(noise.bits(rows.word0[:, None], rows.word1[:, None], ids))
    choice = jnp.argmax(x + g * rows.noisy[:, None], axis=1).astype(jnp.int32)
    lse = jax.nn.logsumexp(x, axis=1)
    token = jnp.maximum(rows.token, 0)
    log_p = jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] - lse
    return RowStatistics(choice, lse, log_p)
