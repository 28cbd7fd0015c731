"""Verification: two exact rules that turn drafts and target rows into emitted tokens (DESIGN section 3).

``rejection`` (paper section 2.1): accept x_k with probability min(1, p_k / q_k); at the first rejection draw from
the residual max(p - q, 0). ``coupled``: draft and target take the arg-max of log-probability plus the same Gumbel
numbers; a draft is accepted iff it equals the target's own choice, and what is emitted is always that choice.
Target rows stay flat ``[T, V]``; only the one row at which a block ends is gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax.numpy as jnp

from dspark_jax.layout import Layout
from dspark_jax.noise import ACCEPT, PLAIN, RESIDUAL, Noise, NoiseKey
from dspark_jax.types import EMPTY, Array, cond

RESIDUAL_FLOOR = 1e-8
"""At or below this residual mass the draw is from p itself, as in the reference."""


class Drafts(flax.struct.PyTreeNode):
    """The drafts of R rows as verification needs them (see ``drafters.base.Proposal``)."""

    tokens: Array  # [R, G] target ids
    log_q: Array  # [R, G] of each token, under the distribution it was drawn from


QRow = Callable[[Array], Array]
"""``place [R] -> log q [R, V]`` over target ids, -inf outside the draft vocabulary: the draft distribution at that
place of each row. Asked once, and only where a row may reject."""


class RowKeys(flax.struct.PyTreeNode):
    """What keys the numbers of R rows."""

    seed: Array  # [R] uint32
    cycle: Array  # [R] int32, the request's own cycle number
    length: Array  # [R] int32, position of the anchor
    coupled: Array  # [R] bool
    greedy: Array  # [R] bool


class Verdict(flax.struct.PyTreeNode):
    """Outcome of a verification."""

    accepted: Array  # [R] int32: leading drafts that were accepted
    next_token: Array  # [R] int32: the target's own token behind them


def plain_key(keys: RowKeys, row: Array, offset: Array) -> NoiseKey:
    """Key of plain decoding and of ``coupled``: the absolute position of the token that is drawn."""
    position = keys.length[row] + offset + 1
    zero = jnp.zeros_like(position)
    return NoiseKey(keys.seed[row], position, zero, zero + PLAIN)


def cycle_key(keys: RowKeys, offset: Array, purpose: int) -> NoiseKey:
    """Key of ``rejection`` for R rows: the request's cycle number and the place in the block."""
    offset = jnp.broadcast_to(offset, keys.seed.shape).astype(jnp.int32)
    return NoiseKey(keys.seed, keys.cycle, offset, jnp.full_like(offset, purpose))


def choose(log_p: Array, layout: Layout, keys: RowKeys, noise: Noise) -> Array:
    """The target's own choice ``[T]`` at every flat row under the plain key: what plain decoding would emit."""
    greedy = keys.greedy | ~keys.coupled
    return noise.categorical(log_p, plain_key(keys, layout.row, layout.offset), None, greedy[layout.row])


def verify(
    log_p: Array, layout: Layout, drafts: Drafts, admitted: Array, keys: RowKeys, noise: Noise, q_row: QRow
) -> Verdict:
    """Verifies the admitted drafts of R rows.

    Args:
        log_p: ``[T, V]`` log-probabilities of the target's sampled distribution at every flat token.
        layout: rows hold 1 + admitted tokens: the anchor and the drafts. W - 1 <= G drafts are looked at.
        admitted: ``[R]`` drafts offered, 0..W-1. The rule by which they were chosen must not have looked at the
            tokens, unless the row is ``coupled`` or greedy.
    """
    offered = layout.width - 1
    tokens = drafts.tokens[:, :offered]
    choice = layout.pad(choose(log_p, layout, keys, noise))  # [R, W]
    same = tokens == choice[:, :offered]
    decide = keys.coupled | keys.greedy
    tests = cond(
        jnp.all(decide),
        lambda: same,
        lambda: jnp.where(decide[:, None], same, _rejection_tests(log_p, layout, drafts, keys, noise)),
    )
    tests = tests & (jnp.arange(offered)[None, :] < admitted[:, None])
    accepted = jnp.sum(jnp.cumprod(tests.astype(jnp.int32), axis=1), axis=1)
    own = jnp.take_along_axis(choice, accepted[:, None], axis=1)[:, 0]
    next_token = cond(
        jnp.all(decide),
        lambda: own,
        lambda: jnp.where(decide, own, _residual_draw(log_p, layout, q_row, admitted, accepted, keys, noise)),
    )
    return Verdict(accepted.astype(jnp.int32), next_token.astype(jnp.int32))


def _rejection_tests(log_p: Array, layout: Layout, drafts: Drafts, keys: RowKeys, noise: Noise) -> Array:
    """``[R, W - 1]``: accepted with probability min(1, p / q), each with its own number."""
    offered = layout.width - 1
    # Flat row of place k holds the distribution of draft k.
    rows = jnp.arange(keys.seed.shape[0])
    flat = layout.index[:, :offered]
    p = log_p[flat, drafts.tokens[:, :offered]]
    ratio = jnp.exp(jnp.minimum(p - drafts.log_q[:, :offered].astype(p.dtype), 0.0))
    columns = [noise.accept(ratio[:, k], cycle_key(keys, jnp.full(rows.shape, k), ACCEPT)) for k in range(offered)]
    return jnp.stack(columns, axis=1) if columns else jnp.zeros((rows.shape[0], 0), bool)


def _residual_draw(
    log_p: Array, layout: Layout, q_row: QRow, admitted: Array, accepted: Array, keys: RowKeys, noise: Noise
) -> Array:
    """``[R]``: from max(p - q, 0) at a rejected draft, from p behind the last offered one."""
    rows = jnp.arange(accepted.shape[0])
    row_log_p = log_p[layout.index[rows, accepted]]  # [R, V]
    rejected = accepted < admitted
    q = jnp.exp(q_row(jnp.clip(accepted, 0, layout.width - 2))).astype(row_log_p.dtype)
    residual = jnp.maximum(jnp.exp(row_log_p) - q, 0.0)
    use = rejected & (jnp.sum(residual, axis=-1) > RESIDUAL_FLOOR)
    row_log = jnp.where(use[:, None], jnp.log(residual), row_log_p)
    return noise.categorical(row_log, cycle_key(keys, accepted, RESIDUAL), None, keys.greedy)


def draw_undrafted(choice: Array, log_p: Array, layout: Layout, keys: RowKeys, noise: Noise) -> Array:
    """``[R]`` tokens of a cycle that drafted nothing: ``rejection`` rows draw with the key of their own cycle."""
    decide = keys.coupled | keys.greedy
    return cond(
        jnp.all(decide),
        lambda: choice,
        lambda: jnp.where(
            decide,
            choice,
            noise.categorical(
                log_p[layout.index[:, 0]], cycle_key(keys, jnp.zeros_like(keys.cycle), RESIDUAL), None, keys.greedy
            ),
        ),
    )


class Commit(flax.struct.PyTreeNode):
    """What a cycle emitted for each of R rows."""

    tokens: Array  # [R, W] target ids, EMPTY from count on
    count: Array  # [R] int32: accepted + 1 unless a stop or the limit cut it; 0 for idle rows
    accepted: Array  # [R] int32
    offered: Array  # [R] int32
    finished: Array  # [R] bool: a stop token, the limit or a failure ended the row in this cycle
    stopped: Array  # [R] bool: it was a stop token
    failed: Array  # [R] bool: what comes after its tokens is no distribution (NaN)


def emitted(verdict: Verdict, tokens: Array) -> Array:
    """``[R, G + 1]``: accepted drafts of ``tokens [R, G]`` and the token behind them; garbage from there on."""
    own = verdict.next_token[:, None]
    if tokens.shape[1] == 0:
        return own
    padded = jnp.concatenate([tokens, tokens[:, :1]], axis=1)
    return jnp.where(jnp.arange(padded.shape[1])[None, :] == verdict.accepted[:, None], own, padded)


def commit(
    verdict: Verdict,
    tokens: Array,
    admitted: Array,
    active: Array,
    remaining: Array,
    stop_ids: Array,
    sound: Array,
) -> Commit:
    """Cuts a verdict at the first stop token, at the limit, and before the first token that nothing stands behind.

    Args:
        tokens: ``[R, G]`` drafts. remaining: ``[R]`` tokens the row may still emit. stop_ids: ``[R, N]``, EMPTY
            where unused. A stop token is kept as the row's last; one among the accepted drafts has nothing after
            it, and drafts behind it do not count as offered.
        sound: ``[R, G + 1]`` bool, False for a token that no distribution stands behind: it comes of hidden states or
            weights that are not finite, and the row ends before it.
    """
    width = tokens.shape[1] + 1
    place = jnp.arange(width)[None, :]
    emits = emitted(verdict, tokens)
    count = verdict.accepted + 1
    is_stop = jnp.any(emits[:, :, None] == stop_ids[:, None, :], axis=-1) & (place < count[:, None])
    first_stop = jnp.min(jnp.where(is_stop, place, width), axis=1)
    bad = ~sound & (place < count[:, None])
    first_bad = jnp.min(jnp.where(bad, place, width), axis=1)
    limit = jnp.minimum(remaining, first_bad)
    in_drafts = (first_stop < verdict.accepted) & (first_stop < limit)
    accepted = jnp.where(in_drafts, first_stop + 1, verdict.accepted)
    offered = jnp.where(in_drafts, first_stop + 1, admitted)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), limit)
    stopped = active & (first_stop < count)
    failed = active & ~stopped & jnp.any(bad, axis=1) & (count == first_bad) & (count < remaining)
    finished = stopped | failed | (active & (count >= remaining))
    count = jnp.where(active, count, 0)
    zero = jnp.zeros_like(count)
    works = count > 0
    return Commit(
        tokens=jnp.where(place < count[:, None], emits, EMPTY).astype(jnp.int32),
        count=count.astype(jnp.int32),
        accepted=jnp.where(works, accepted, zero).astype(jnp.int32),
        offered=jnp.where(works, offered, zero).astype(jnp.int32),
        finished=finished,
        stopped=stopped,
        failed=failed,
    )
