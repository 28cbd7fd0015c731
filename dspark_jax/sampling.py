"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p, in this order.

No sort over the vocabulary: the edge of top-k and of top-p is found bit by bit on the order-preserving integer
image of the floats, one counting pass a bit. That is exact, costs the same for every k and p, and keeps ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import Sampling
from dspark_jax.sharding import cut_vocab
from dspark_jax.types import GREEDY_TEMPERATURE, Array, accumulate_dtype, cond


class SamplingRows(flax.struct.PyTreeNode):
    """Sampling settings of B rows."""

    temperature: Array  # [B] float32
    top_k: Array  # [B] int32, 0 = off
    top_p: Array  # [B] float32, 1 = off
    min_p: Array  # [B] float32, 0 = off

    @property
    def greedy(self) -> Array:
        """[B] bool: rows at temperature 0."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def filtered(self) -> Array:
        """[B] bool: rows whose distribution lacks tokens (top-k, top-p, min-p); they need whole rows of logits."""
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))

    def take(self, index: Array) -> SamplingRows:
        """The rows at ``index [N]``."""
        return jax.tree.map(lambda a: a[index], self)


def sampling_rows(sampling: Sampling | Sequence[Sampling], rows: int) -> SamplingRows:
    """Settings of ``rows`` rows from one Sampling for all or one for each."""

    if isinstance(sampling, Sampling):
        return jax.tree.map(lambda a: jnp.full(rows, a), sampling_row(sampling))
    if len(sampling) != rows:
        raise ValueError(f"{len(sampling)} Sampling settings for {rows} rows")
    return jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *map(sampling_row, sampling))


def sampling_row(sampling: Sampling) -> SamplingRows:
    """The numpy scalars of one row. What float32 or int32 cannot hold becomes a number of the same meaning: a top_p
    that rounds to 0 would keep no token at all, a temperature whose reciprocal does would make NaN of masked logits."""
    largest, smallest = 1e30, float(np.finfo(np.float32).tiny)
    fields: dict[str, Any] = {
        "temperature": np.float32(min(sampling.temperature, largest)),
        "top_k": np.int32(min(sampling.top_k, 2**31 - 1)),
        "top_p": np.float32(max(sampling.top_p, smallest)),
        "min_p": np.float32(sampling.min_p),
    }
    return SamplingRows(**fields)


def log_probs(logits: Array, rows: SamplingRows) -> Array:
    """Log-probabilities ``[B, V]`` of the sampled distribution, -inf for excluded tokens.

    Greedy rows are one-hot at the (first) arg-max, which is the limit of both verification rules.
    """
    dtype = accumulate_dtype(logits.dtype)
    logits = logits.astype(dtype)
    greedy = rows.greedy

    def sampled(x: Array) -> Array:
        temperature = jnp.where(greedy, 1.0, rows.temperature).astype(dtype)
        x = x / temperature[:, None]
        x = _when(jnp.any(rows.top_k > 0), lambda y: _keep_top_k(y, rows.top_k), x)
        x = _when(jnp.any(rows.top_p < 1.0), lambda y: _keep_top_p(y, rows.top_p), x)
        x = _when(jnp.any(rows.min_p > 0.0), lambda y: _keep_min_p(y, rows.min_p), x)
        return cut_vocab(jnp.where(greedy[:, None], one_hot_log(x), jax.nn.log_softmax(x, axis=-1)))

    return cut_vocab(cond(jnp.all(greedy), lambda x: cut_vocab(one_hot_log(x)), sampled, cut_vocab(logits)))


def one_hot_log(logits: Array) -> Array:
    """0 at the first arg-max of each row ``[B, V]``, -inf elsewhere. A row that holds NaN, or no finite maximum, has
    NaN in place of the 0: like a softmax it must not pass for a distribution."""
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    columns = jax.lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
    zero = jnp.take_along_axis(logits, best, axis=-1) * 0.0
    return jnp.where(columns == best, zero, -jnp.inf).astype(logits.dtype)


def _when(predicate: Array, f: Callable[[Array], Array], x: Array) -> Array:
    """``f(x)`` if the scalar predicate holds, at no cost otherwise."""
    return cond(predicate, lambda y: cut_vocab(f(y)), cut_vocab, x)


def _ordered_bits(x: Array) -> Array:
    """Unsigned integers ``[B, V]`` in the same order as the floats."""
    wide = x.dtype == jnp.float64
    signed = jax.lax.bitcast_convert_type(x + 0.0, jnp.int64 if wide else jnp.int32)  # + 0.0: -0 becomes 0
    unsigned = jnp.uint64 if wide else jnp.uint32
    top = unsigned(1 << (63 if wide else 31))
    bits = jax.lax.bitcast_convert_type(signed, unsigned)
    return jnp.where(signed < 0, ~bits, bits | top)


def _edge(bits: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest threshold ``[B]`` for which ``enough(bits >= threshold)`` ([B, V] bool -> [B] bool) holds."""
    width = bits.dtype.itemsize * 8

    def step(i: Array, edge: Array) -> Array:
        candidate = edge | (bits.dtype.type(1) << (width - 1 - i).astype(bits.dtype))
        return jnp.where(enough(bits >= candidate[:, None]), candidate, edge)

    return jax.lax.fori_loop(0, width, step, jnp.zeros(bits.shape[0], bits.dtype))


def _keep_top_k(x: Array, k: Array) -> Array:
    bits = _ordered_bits(x)
    wanted = jnp.where(k > 0, jnp.minimum(k, x.shape[-1]), x.shape[-1])
    edge = _edge(bits, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= wanted)
    return jnp.where((bits >= edge[:, None]) | (k <= 0)[:, None], x, -jnp.inf)


def _keep_top_p(x: Array, p: Array) -> Array:
    probs = jax.nn.softmax(x, axis=-1)
    bits = _ordered_bits(probs)
    wanted = p.astype(x.dtype)
    edge = _edge(bits, lambda kept: jnp.sum(jnp.where(kept, probs, 0.0), axis=-1) >= wanted)
    return jnp.where((bits >= edge[:, None]) | (p >= 1.0)[:, None], x, -jnp.inf)


def _keep_min_p(x: Array, p: Array) -> Array:
    floor = jnp.max(x, axis=-1) + jnp.log(jnp.maximum(p.astype(x.dtype), jnp.finfo(x.dtype).tiny))
    return jnp.where((x >= floor[:, None]) | (p <= 0.0)[:, None], x, -jnp.inf)


def mask_beyond(logits: Array, ids: Array | None, limit: int) -> Array:
    """Logits with the columns of target ids >= limit at -inf (``ids [V']``: target ids of the columns)."""
    if ids is None:
        if limit >= logits.shape[-1]:
            return logits
        ids = jax.lax.iota(jnp.int32, logits.shape[-1])
    keep = (ids < limit).reshape((1,) * (logits.ndim - 1) + ids.shape)
    return jnp.where(keep, logits, -jnp.inf)
