"""Verifies drafted tokens by the two exact rules, reading the target's logits once.

Softmax over the vocabulary exists for one row a request at most: the one at which a `rejection` block ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.dispatch import choose
from pallas_kernels.verify import mosaic_gpu, reference, tpu, triton_gpu
from pallas_kernels.verify.spec import RESIDUAL_FLOOR, SOUND_ABOVE, Array, Outcome, Requests, Rows, RowStatistics

QRow = Callable[[Array], Array]


def backend(
    rows: Rows, *, implementation: str | None = None, interpret: Any = None, aot: bool = False, spread: bool = False
) -> str:
    """The backend that ``verify`` would run. ``spread``: the arguments live on several devices."""
    refusals = {
        "mosaic_gpu": mosaic_gpu.refuses(rows),
        "triton": triton_gpu.refuses(rows, interpret),
        "tpu": tpu.refuses(rows),
    }
    return choose("verify", implementation, refusals, interpret=interpret is not None, aot=aot, spread=spread)


def row_statistics(
    rows: Rows, *, implementation: str | None = None, interpret: Any = None, aot: bool = False
) -> RowStatistics:
    """The target's own choice, log-sum-exp and log-probability of the drafted token, for every flat row.

    Args:
        implementation: None (by device, else XLA), ``xla``, ``mosaic_gpu`` (Hopper), ``triton`` (Ampere to Hopper,
            jax-triton installed) or ``tpu``.
        interpret: parameters of the backend's interpreter (``triton``: see ``triton_call.call``). aot: compiled for a
            device that is not here.

    Raises:
        BackendError: the named backend cannot run this.
    """
    name = backend(rows, implementation=implementation, interpret=interpret, aot=aot)
    if name == "mosaic_gpu":
        return mosaic_gpu.row_statistics(rows, interpret)
    if name == "triton":
        return triton_gpu.row_statistics(rows, interpret)
    if name == "tpu":
        return tpu.row_statistics(rows, interpret)
    return reference.row_statistics(rows)


def verify(
    rows: Rows,
    requests: Requests,
    q_row: QRow,
    *,
    implementation: str | None = None,
    interpret: Any = None,
    aot: bool = False,
) -> Outcome:
    """Accepts the longest prefix and draws the token behind it.

    ``rejection``: draft k is accepted with probability min(1, p / q); at the first rejection the token comes from
    max(p - q, 0), behind the last admitted draft from p. ``decide`` rows accept what the target itself chooses.

    Args:
        q_row: ``place [R] -> log q [R, V]`` over *target* ids: the draft distribution at that place of each request
            (``markov_sample.row_log_q`` rebuilds it). Called once, under a condition that is false where every
            request decides by its own choice.
    """
    statistics = row_statistics(rows, implementation=implementation, interpret=interpret, aot=aot)
    drafts = requests.tokens.shape[1]
    choice = statistics.choice[requests.rows]  # [R, G + 1]
    same = requests.tokens == choice[:, :drafts]
    log_p = statistics.log_p[requests.rows[:, :drafts]]
    ratio = jnp.exp(jnp.minimum(log_p - requests.log_q, 0.0))
    zero = jnp.zeros_like(requests.tokens)
    drawn = noise.unit(noise.bits(requests.accept0, requests.accept1, zero)) < ratio
    tests = jnp.where(requests.decide[:, None], same, drawn)
    tests = tests & (jnp.arange(drafts)[None, :] < requests.admitted[:, None])
    accepted = jnp.sum(jnp.cumprod(tests.astype(jnp.int32), axis=1), axis=1).astype(jnp.int32)
    own = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    next_token = lax.cond(
        jnp.all(requests.decide),
        lambda: own,
        lambda: jnp.where(requests.decide, own, _draw(rows, statistics, requests, accepted, q_row)),
    )
    return Outcome(accepted, next_token, jnp.isfinite(statistics.lse) & (statistics.lse > SOUND_ABOVE))


def _draw(rows: Rows, statistics: RowStatistics, requests: Requests, accepted: Array, q_row: QRow) -> Array:
    """``[R]``: from the residual at a rejected draft, from p behind the last admitted one."""
    at = jnp.take_along_axis(requests.rows, accepted[:, None], axis=1)[:, 0]
    log_p = rows.logits[at].astype(jnp.float32) * rows.inverse[at][:, None] - statistics.lse[at][:, None]
    rejected = accepted < requests.admitted
    place = jnp.minimum(accepted, requests.tokens.shape[1] - 1)
    residual = jnp.maximum(jnp.exp(log_p) - jnp.exp(q_row(place)), 0.0)
    use = rejected & (jnp.sum(residual, axis=1) > RESIDUAL_FLOOR)
    row = jnp.where(use[:, None], jnp.log(residual), log_p)
    word0, word1 = (jnp.take_along_axis(w, accepted[:, None], axis=1) for w in (requests.draw0, requests.draw1))
    ids = jnp.arange(row.shape[1], dtype=jnp.int32)[None, :]
    return jnp.argmax(row + noise.gumbel(noise.bits(word0, word1, ids)), axis=1).astype(jnp.int32)
