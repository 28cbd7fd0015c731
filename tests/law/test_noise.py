"""The one source of random numbers: uniform, independent where it must be, equal where it must be.

The keys are fixed, so a test passes always or never. A false alarm of probability p means: of all ideal random
functions in place of the hash, a share p would fail. It is 1e-6 a statistic at most, 40 statistics in all.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.noise import (
    ACCEPT,
    DRAFT,
    HASH_NOISE,
    PLAIN,
    RESIDUAL,
    HashNoise,
    NoiseKey,
    distinct_seeds,
    gumbel,
    mix,
    row_bits,
    unit,
)
from tests.law.exact import FALSE_ALARM, p_value

WORD = 1 << 32


def keys(seed: object, counter: object, offset: object, purpose: object) -> NoiseKey:
    parts = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in (seed, counter, offset, purpose)))
    seeds, *rest = parts
    return NoiseKey(jnp.asarray(seeds.astype(np.uint32)), *(jnp.asarray(r.astype(np.int32)) for r in rest))


def bits(key: NoiseKey, ids: int) -> np.ndarray:
    return np.asarray(row_bits(key, jnp.arange(ids)))


SWEEPS = {
    "seed": lambda n: keys(np.arange(n), 5, 0, PLAIN),
    "large seeds": lambda n: keys(WORD - 1 - np.arange(n, dtype=np.int64) * 65537, 5, 0, PLAIN),
    "position": lambda n: keys(1, np.arange(n), 0, PLAIN),
    "cycle number": lambda n: keys(1, np.arange(n), 2, ACCEPT),
    "offset": lambda n: keys(np.arange(n) // 16, 3, np.arange(n) % 16, DRAFT),
}


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_every_byte_of_the_hash_is_uniform(name: str, shift: int) -> None:
    """262,144 numbers, one argument swept, 256 cells; false alarm 1e-6 each."""
    byte = (bits(SWEEPS[name](4096), 64) >> shift) & 255
    counts = np.bincount(byte.reshape(-1), minlength=256)
    assert p_value(counts, byte.size / 256) > FALSE_ALARM


NEIGHBOURS = {
    "draft and accept": (keys(0, 0, 0, DRAFT), keys(0, 0, 0, ACCEPT)),
    "draft and residual": (keys(0, 0, 0, DRAFT), keys(0, 0, 0, RESIDUAL)),
    "accept and residual": (keys(0, 0, 0, ACCEPT), keys(0, 0, 0, RESIDUAL)),
    "plain and draft": (keys(0, 0, 0, PLAIN), keys(0, 0, 0, DRAFT)),
    "position and the next": (keys(0, 0, 0, PLAIN), keys(0, 1, 0, PLAIN)),
    "cycle and the one after next": (keys(0, 0, 0, DRAFT), keys(0, 2, 0, DRAFT)),
    "place in the block and the next": (keys(0, 0, 0, DRAFT), keys(0, 0, 1, DRAFT)),
    "cycle and offset swapped": (keys(0, 1, 2, DRAFT), keys(0, 2, 1, DRAFT)),
    "seed and the next": (keys(0, 0, 0, DRAFT), keys(1, 0, 0, DRAFT)),
}


@pytest.mark.parametrize("shift", [0, 28])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_numbers_of_different_keys_are_independent(name: str, shift: int) -> None:
    """Joint counts of 4 bits each over 262,144 pairs, seeds swept, 256 cells; false alarm 1e-6 each."""
    first, second = (
        bits(keys(4 * np.arange(8192) + int(k.seed[0]), *(int(x[0]) for x in (k.counter, k.offset, k.purpose))), 32)
        for k in NEIGHBOURS[name]
    )
    cell = ((first >> shift) & 15) * 16 + ((second >> shift) & 15)
    counts = np.bincount(cell.reshape(-1), minlength=256)
    assert p_value(counts, cell.size / 256) > FALSE_ALARM


def test_numbers_of_neighbouring_tokens_are_independent() -> None:
    """Top 4 bits of token ids i and i + 1 of one row; false alarm 1e-6."""
    top = bits(keys(np.arange(4096), 9, 0, PLAIN), 65) >> 28
    counts = np.bincount((top[:, :-1] * 16 + top[:, 1:]).reshape(-1), minlength=256)
    assert p_value(counts, top[:, 1:].size / 256) > FALSE_ALARM


def test_the_mixer_is_a_bijection() -> None:
    """Its inverse gives every word back: x ^ x >> s and the multiplication by an odd number are invertible."""
    words = np.random.default_rng(0).integers(0, WORD, 4096, dtype=np.uint64)
    h = np.asarray(mix(jnp.asarray(words.astype(np.uint32)))).astype(np.uint64)

    def unshift(x: np.ndarray, s: int) -> np.ndarray:
        y = x
        for _ in range(32 // s):
            y = x ^ (y >> np.uint64(s))
        return y

    h = unshift(h, 16)
    h = h * np.uint64(pow(0xC2B2AE35, -1, WORD)) % np.uint64(WORD)
    h = unshift(h, 13)
    h = h * np.uint64(pow(0x85EBCA6B, -1, WORD)) % np.uint64(WORD)
    np.testing.assert_array_equal(unshift(h, 16), words)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_smallest_and_the_largest_word_give_finite_numbers(dtype: type, x64: None) -> None:
    """(h + 1/2) 2^-32 is kept inside (0, 1), so that no Gumbel number is infinite."""
    ends = jnp.asarray([0, 1, WORD // 2, WORD - 2, WORD - 1], jnp.uint32)
    u = np.asarray(unit(ends, jnp.dtype(dtype)))
    g = np.asarray(gumbel(ends, jnp.dtype(dtype)))
    assert (u > 0).all() and (u < 1).all()
    assert np.isfinite(g).all() and (np.diff(g) <= 0).all()
    assert g[0] == pytest.approx(33 * np.log(2.0), rel=1e-6)  # the rarest winner: u = 2^-33


def test_gumbel_numbers_have_the_gumbel_law() -> None:
    """65,536 numbers in 64 cells of equal probability exp(-exp(-g)); false alarm 1e-6."""
    g = np.asarray(gumbel(row_bits(keys(np.arange(1024), 1, 0, PLAIN), jnp.arange(64)), jnp.dtype(jnp.float32)))
    cell = np.minimum((np.exp(-np.exp(-g.astype(np.float64))) * 64).astype(int), 63)
    assert p_value(np.bincount(cell.reshape(-1), minlength=64), g.size / 64) > FALSE_ALARM


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """A token of probability 2^-22 among one of nearly 1: over all 2^32 words of its Gumbel number it would win with
    that probability; a uniform of 23 bits near 1 could not tell it from 2^-23 or 2^-21.

    Computed, not sampled: the largest hash word with which it still beats a rival of noise 0.
    """
    for exponent in (12, 22, 26):
        log_p = -exponent * np.log(2.0)
        low, high = 0, WORD - 1  # gumbel falls with the word: the winning words are 0..low
        while low < high:
            middle = (low + high + 1) // 2
            wins = float(gumbel(jnp.asarray([middle], jnp.uint32), jnp.dtype(jnp.float32))[0]) + log_p > 0
            low, high = (middle, high) if wins else (low, middle - 1)
        exact = -np.expm1(-np.exp(log_p)) * WORD  # P(g > x) = 1 - exp(-exp(-x))
        assert low + 1 == pytest.approx(exact, rel=2e-3)


def test_sampled_tokens_have_the_law_asked_for() -> None:
    """65,536 draws of a law over 8 tokens, one token forbidden; false alarm 1e-6."""
    law = np.array([0.3, 0.2, 0.0, 0.2, 0.1, 0.1, 0.06, 0.04])
    rows = 1 << 16
    with np.errstate(divide="ignore"):
        log_p = jnp.broadcast_to(jnp.asarray(np.log(law), jnp.float32)[None], (rows, law.size))
    token = HASH_NOISE.categorical(log_p, keys(np.arange(rows), 0, 0, DRAFT), None, jnp.zeros(rows, bool))
    counts = np.bincount(np.asarray(token), minlength=law.size)
    assert counts[2] == 0
    assert p_value(counts[law > 0], rows * law[law > 0]) > FALSE_ALARM


def test_acceptance_is_certain_at_one_and_impossible_at_zero() -> None:
    """And has the probability asked for between: 65,536 trials at 0.3; false alarm 1e-6."""
    rows = 1 << 16
    key = keys(np.arange(rows), 0, 1, ACCEPT)
    assert HASH_NOISE.accept(jnp.ones(rows), key).all()
    assert not HASH_NOISE.accept(jnp.zeros(rows), key).any()
    yes = int(HASH_NOISE.accept(jnp.full(rows, 0.3), key).sum())
    assert p_value(np.array([yes, rows - yes]), np.array([0.3, 0.7]) * rows) > FALSE_ALARM


def test_a_row_reads_the_same_numbers_wherever_it_stands_and_whatever_the_vocabulary() -> None:
    """Nothing but the key and the token id enters: not the row index, the batch size, padding or column order."""
    key = keys(np.arange(6), np.arange(6) + 3, 0, PLAIN)
    whole = bits(key, 50)
    order = np.array([4, 0, 5])
    some = row_bits(jax.tree.map(lambda x: x[order], key), jnp.asarray([7, 3, 49]))
    np.testing.assert_array_equal(np.asarray(some), whole[order][:, [7, 3, 49]])
    np.testing.assert_array_equal(bits(key, 20), whole[:, :20])


def test_draft_columns_read_the_noise_of_their_target_ids() -> None:
    """With the logits permuted alike, the same target token is drawn."""
    rows, order = 64, np.array([3, 0, 4, 1, 2])
    key, sampled = keys(np.arange(rows), 2, 0, PLAIN), jnp.zeros(rows, bool)
    log_p = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(0).normal(size=(rows, 5)), jnp.float32))
    plain = HASH_NOISE.categorical(log_p, key, None, sampled)
    column = HASH_NOISE.categorical(log_p[:, order], key, jnp.asarray(order), sampled)
    np.testing.assert_array_equal(order[np.asarray(column)], np.asarray(plain))


def test_greedy_rows_draw_no_noise() -> None:
    """Temperature 0 beside sampled rows is the arg-max, and the sampled rows do not notice."""
    rows = 32
    log_p = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 9)), jnp.float32)
    key, half = keys(np.arange(rows), 0, 0, PLAIN), jnp.arange(rows) % 2 == 0
    mixed = HASH_NOISE.categorical(log_p, key, None, half)
    sampled = HASH_NOISE.categorical(log_p, key, None, jnp.zeros(rows, bool))
    np.testing.assert_array_equal(np.asarray(mixed), np.where(half, np.argmax(log_p, axis=-1), sampled))


def test_repeated_seeds_become_distinct_and_first_ones_stay() -> None:
    """The k-th repetition depends on the seed and k alone, so equal requests before it are all that matters."""
    seeds = np.array([7, 7, 9, 7, WORD - 1, 9, 0, 0], np.uint32)
    out = np.asarray(distinct_seeds(jnp.asarray(seeds)))
    first = [0, 2, 4, 6]
    np.testing.assert_array_equal(out[first], seeds[first])
    assert len(set(out.tolist())) == seeds.size
    moved = np.asarray(distinct_seeds(jnp.asarray(seeds[[6, 1, 7, 2, 0, 3]])))
    assert moved[2] == out[7] and moved[4] == out[1] and moved[5] == out[3]


def test_distinct_seeds_of_many_equal_ones_never_meet_a_neighbouring_seed() -> None:
    """512 rows of one seed beside all 512 seeds around it: a meeting by chance has probability 1e-4."""
    mixed = np.asarray(distinct_seeds(jnp.full(512, 41, jnp.uint32)))
    assert len(set(mixed.tolist()) | set(range(42, 554))) == 1024


def test_the_noise_is_a_static_value() -> None:
    """Two instances are equal, so a jitted step compiles once."""
    assert HashNoise() == HASH_NOISE and hash(HashNoise()) == hash(HASH_NOISE)


def test_no_number_serves_two_purposes_in_a_block() -> None:
    """All keys of ten cycles of one request are different words."""
    grid = itertools.product(range(10), range(8), (DRAFT, ACCEPT, RESIDUAL))
    cycle, offset, purpose = (np.array(x) for x in zip(*grid, strict=True))
    words = bits(keys(3, cycle, offset, purpose), 2)
    plain = bits(keys(3, np.arange(200), 0, PLAIN), 2)
    rows = {tuple(row) for row in np.concatenate([words, plain]).tolist()}
    assert len(rows) == words.shape[0] + plain.shape[0]
