"""Padding never reaches a real row: ragged steps against dense ones, poison in padding, idle slots and old cells.

Tiny transformers in float64, two rows of which are cut short, so that the flat forward really has fewer tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, cycle
from dspark_jax.cycle import DecodeState
from dspark_jax.drafters import Drafter
from dspark_jax.kv_cache import KVCache, storable
from dspark_jax.layout import dense_layout, ragged_layout
from dspark_jax.nn.attention import KeyBlock, attention
from dspark_jax.targets import Target
from dspark_jax.testing import open_slots, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("x64")

SLOTS, G, CELLS = 4, 3, 24
LENGTHS = np.array([6, 2, 5, 1])
ADMITTED = (np.array([3, 0, 2, 1]), np.array([1, 3, 0, 0]))
POISON = 30  # a token no text holds; its embedding is spoiled in the poisoned target
RAGGED = {"tokens": 12, "context": 16}


@functools.cache
def models() -> tuple[Target, Drafter]:
    target = tiny_target(num_layers=2, dtype=jnp.float64)
    return target, tiny_drafter(target, block_size=G, target_layer_ids=(0,))


@functools.cache
def opened() -> DecodeState:
    target, drafter = models()
    ids = np.random.default_rng(0).integers(0, POISON, (SLOTS, int(LENGTHS.max())))
    fill = functools.partial(open_slots, max_new_tokens=CELLS - ids.shape[1] - G - 1, sampling=Sampling(0.8))
    return jax.jit(lambda t, d: fill(t, d, jnp.asarray(ids), lengths=jnp.asarray(LENGTHS)))(target, drafter)


@functools.partial(jax.jit, static_argnames=("tokens", "context", "rows"))
def one_cycle(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    admitted: jax.Array,
    tokens: int | None = None,
    context: int | None = None,
    rows: int | None = None,
) -> tuple[DecodeState, Any, Any]:
    proposal = cycle.draft(drafter, state, num_drafts=G, context=context, rows=rows)
    state, result = cycle.step(target, drafter, state, proposal, admitted, tokens=tokens, context=context, rows=rows)
    rows_first = proposal.replace(base=proposal.base.swapaxes(0, 1), z=proposal.z.swapaxes(0, 1))
    return state, rows_first, result


def two_cycles(state: DecodeState, **static: int) -> list[Any]:
    out = []
    for admitted in ADMITTED:
        state, proposal, result = one_cycle(*models(), state, jnp.asarray(admitted), **static)
        out += [proposal, result]
    return [state, *out]


@functools.cache
def dense() -> list[Any]:
    return two_cycles(opened())


def same(first: list[Any], second: list[Any], rows: np.ndarray | None = None) -> None:
    """Emitted tokens exactly, everything else to 1e-12; cache cells only up to each row's length."""
    chosen = np.arange(SLOTS) if rows is None else rows
    for a, b in zip(first[1:], second[1:], strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(np.asarray(x)[chosen], np.asarray(y)[chosen], rtol=1e-10, atol=1e-12)
    a, b = first[0], second[0]
    for name in ("length", "anchor", "active", "cycle", "remaining"):
        np.testing.assert_array_equal(np.asarray(getattr(a, name))[chosen], np.asarray(getattr(b, name))[chosen])
    for x, y in zip(jax.tree.leaves((a.target, a.draft)), jax.tree.leaves((b.target, b.draft)), strict=True):
        for row in chosen:
            real = int(a.length[row])
            np.testing.assert_allclose(np.asarray(x)[row, :, :real], np.asarray(y)[row, :, :real], atol=1e-12)


def test_a_ragged_step_over_part_of_the_cache_is_the_dense_step_over_all_of_it() -> None:
    """Ten real tokens of sixteen in the first cycle, eight in the second, packed into 12 places; cells beyond the
    context bucket are not read."""
    same(dense(), two_cycles(opened(), **RAGGED))


@pytest.mark.parametrize(("rows", "tokens", "dense_then"), [(1, 3, True), (1, 2, True), (2, 3, False)])
def test_no_row_is_padded_beyond_the_tokens_of_the_step(rows: int, tokens: int, dense_then: bool) -> None:
    """Fewer flat tokens than a block has: attention is that wide, and of one row the flat tokens are the row."""
    target, drafter = models()
    proposal = cycle.draft(drafter, opened(), num_drafts=G, rows=rows)
    admitted = jnp.zeros(rows, jnp.int32).at[0].set(tokens - rows)
    found = [
        cycle.step_with_law(target, drafter, opened(), proposal, admitted, rows=rows, tokens=size)
        for size in (tokens, None)
    ]
    (state, result, _, layout), (whole, wanted, _, _) = found
    assert (layout.width, layout.dense) == (tokens, dense_then)
    same([state, result], [whole, wanted.replace(tokens=wanted.tokens[:, :tokens])], np.arange(rows))


@pytest.mark.parametrize("static", [{}, RAGGED])
def test_idle_slots_neither_change_nor_disturb(static: dict[str, int]) -> None:
    """Slot 1 idle, its cells NaN: the others do as before, and it commits nothing and keeps its state."""
    state = opened()
    spoiled = jax.tree.map(lambda x: x.at[1].set(jnp.nan), (state.target, state.draft))
    idle = state.replace(active=state.active.at[1].set(False), target=spoiled[0], draft=spoiled[1])
    out = two_cycles(idle, **static)
    same(dense(), out, np.array([0, 2, 3]))
    for name in ("length", "anchor", "cycle", "remaining"):
        assert int(getattr(out[0], name)[1]) == int(getattr(state, name)[1])
    for result in (out[2], out[4]):
        assert int(result.count[1]) == int(result.offered[1]) == 0 and (result.tokens[1] == -1).all()


@pytest.mark.parametrize("key", [1e3, np.inf, np.nan])
def test_cells_past_the_length_are_never_read(key: float) -> None:
    """Rollback is a length: whatever stands in the cells behind it, the cycle does the same. Values are finite by the
    cache's invariant, keys need not be."""
    state = opened()

    def spoil(cache: KVCache) -> KVCache:
        def fill(cells: jax.Array, garbage: float) -> jax.Array:
            past = jnp.arange(cells.shape[2])[None, :] >= state.length[:, None]
            return jnp.where(past[:, None, :, None], garbage, cells)

        return KVCache(tuple(fill(k, key) for k in cache.k), tuple(fill(v, 1e30) for v in cache.v))

    draft = state.draft.replace(cache=spoil(state.draft.cache))
    same(dense(), two_cycles(state.replace(target=spoil(state.target), draft=draft)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_cache_holds_finite_values_and_the_request_still_meets_its_nan(bad: float) -> None:
    """What is not finite in a value stands as NaN in its key: visible to whoever attends to the cell, and only then."""
    k, v = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4)).at[1, 2, 3].set(bad)
    stored_k, stored_v = storable(k, v)
    assert np.isfinite(stored_v).all() and stored_v[1, 2, 3] == 0 and (np.isnan(stored_k) == ~np.isfinite(v)).all()
    cells = [x.swapaxes(0, 1)[None] for x in (stored_k, stored_v)]  # [1, Hk, 2 cells, D]
    query = jnp.ones((1, 1, 3, 4))
    for seen, clean in ((1, True), (2, False)):
        visible = (jnp.arange(2) < seen)[None, None, :]
        out = attention(query, [KeyBlock(*cells, visible)], 1.0)
        assert np.isfinite(out).all() == clean


@pytest.mark.parametrize("temperature", [0.0, 1.0, -1.0, 1e-30, np.inf, np.nan])
def test_settings_of_idle_slots_reach_no_real_row(temperature: float) -> None:
    """At temperature 0.8, with one slot idle: its seed, rule, temperature and filters are nobody else's."""
    state = opened()
    settings = state.sampling.replace(
        temperature=state.sampling.temperature.at[1].set(temperature),
        top_k=state.sampling.top_k.at[1].set(1),
        top_p=state.sampling.top_p.at[1].set(1e-3),
        min_p=state.sampling.min_p.at[1].set(0.9),
    )
    idle = state.replace(
        active=state.active.at[1].set(False),
        sampling=settings,
        seed=state.seed.at[1].set(0),
        coupled=state.coupled.at[1].set(True),
    )
    for static in ({}, RAGGED):
        same(dense(), two_cycles(idle, **static), np.array([0, 2, 3]))


def poisoned(target: Target, value: float) -> Target:
    table = target.params["embed_tokens"]
    return target.replace(params={**target.params, "embed_tokens": table.at[POISON].set(value)})


@functools.partial(jax.jit, static_argnames="tokens")
def flat_forward(
    target: Target, cache: Any, start: jax.Array, count: jax.Array, block: jax.Array, padding: int, tokens: int
) -> tuple[Any, jax.Array, jax.Array]:
    """``block [SLOTS, G + 1]`` packed into ``tokens`` places, the others filled with the token ``padding``.

    Returns the cache, final and tapped states ``[tokens, 2 d]`` and which places are real.
    """
    layout = ragged_layout(start, count, G + 1, tokens)
    place = jnp.where(jnp.arange(G + 1)[None, :] < count[:, None], layout.index, tokens)
    flat = jnp.full(tokens, padding).at[place].set(block, mode="drop")
    real = jnp.zeros(tokens, bool).at[place].set(True, mode="drop")
    hidden, features, cache = target.forward(flat, layout, cache, taps=(0,))
    return cache, jnp.concatenate([hidden, features], axis=1), real


@pytest.mark.parametrize("tokens", [12, 16])
@pytest.mark.parametrize("value", [1e6, np.inf, np.nan])
def test_poison_in_padding_tokens_reaches_no_real_row(tokens: int, value: float) -> None:
    """The padding of a flat forward holds a token of poisoned embedding. Real rows see none of it, neither in this
    forward nor in the next one, whose context lies beside the cells that padding was written to."""
    target, _ = models()
    state, count = opened(), jnp.asarray(ADMITTED[0] + 1)
    ids = np.random.default_rng(1).integers(0, POISON, (2, SLOTS, G + 1))
    results = []
    for model, padding in ((target, 0), (poisoned(target, value), POISON)):
        cache, start, seen = state.target, state.length, []
        for block in ids:
            cache, states, real = flat_forward(model, cache, start, count, jnp.asarray(block), padding, tokens)
            start, seen = start + count, [*seen, np.asarray(states)[np.asarray(real)]]
        results.append(np.stack(seen))
    assert results[0].shape[1] == int(count.sum()) and np.isfinite(results[1]).all()
    np.testing.assert_allclose(results[0], results[1], atol=1e-12)


@pytest.mark.parametrize("static", [{}, RAGGED])
def test_one_request_of_nan_hidden_states_ends_and_leaves_its_neighbours_alone(static: dict[str, int]) -> None:
    """The anchor of the last slot is poison, all it computes is NaN: it emits nothing, fails and is over. The other
    slots of the batch do as before."""
    target, drafter = models()
    state = opened()
    state = state.replace(anchor=state.anchor.at[SLOTS - 1].set(POISON))
    out: list[Any] = [state]
    for admitted in ADMITTED:
        step = one_cycle(poisoned(target, jnp.nan), drafter, out[0], jnp.asarray(admitted), **static)
        out = [step[0], *out[1:], step[1], step[2]]
    same(dense(), out, np.arange(SLOTS - 1))
    bad = SLOTS - 1
    assert [bool(result.failed[bad]) for result in (out[2], out[4])] == [True, False]
    assert not out[0].active[bad] and int(out[2].count[bad]) == int(out[4].count[bad]) == 0
    assert not np.asarray(out[2].failed[:bad]).any()


def test_layouts_put_every_token_where_it_belongs() -> None:
    """By hand: rows of 2, 0 and 3 tokens at positions 5, 7 and 0, in six places."""
    start, count = jnp.asarray([5, 7, 0]), jnp.asarray([2, 0, 3])
    layout = ragged_layout(start, count, 3, 6)
    assert layout.position[:5].tolist() == [5, 6, 0, 1, 2]
    assert layout.row[:5].tolist() == [0, 0, 2, 2, 2]
    padded = layout.pad(jnp.arange(6) * 10)
    assert padded[0, :2].tolist() == [0, 10] and padded[2].tolist() == [20, 30, 40]
    assert layout.flatten(padded)[:5].tolist() == [0, 10, 20, 30, 40]
    whole = dense_layout(start, count, 3)
    assert ragged_layout(start, count, 3, 9).dense and whole.position.tolist() == [5, 6, 7, 7, 8, 9, 0, 1, 2]
    assert (whole.flatten(whole.pad(jnp.arange(9))) == jnp.arange(9)).all()
