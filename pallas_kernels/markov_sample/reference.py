"""One place of the head in plain XLA: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import noise
from pallas_kernels.markov_sample.spec import Array, Block, Head


def make_step(head: Head, block: Block) -> Callable[..., tuple[Array, Array, Array]]:
    """``step(k, z [B, r], inverse [B], greedy [B]) -> (index, log_q, lse)``, each ``[B]``."""
    vocab = block.base.shape[-1]
    ids = jnp.arange(vocab, dtype=jnp.int32) if block.ids is None else block.ids

    def step(k: Array, z: Array, inverse: Array, greedy: Array) -> tuple[Array, Array, Array]:
        logits = block.base[k].astype(jnp.float32)
        if head.w2 is not None:
            logits = logits + jnp.matmul(z, head.w2.T, preferred_element_type=jnp.float32)
        x = logits * inverse[:, None]
        lse = jax.nn.logsumexp(x, axis=-1)
        g = noise.gumbel(noise.bits(block.word0[k][:, None], block.word1[k][:, None], ids[None, :]))
        index = jnp.argmax(jnp.where(greedy[:, None], x, x + g), axis=-1).astype(jnp.int32)
        chosen = jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
        return index, jnp.where(greedy, 0.0, chosen - lse), lse

    return step
