"""Which blocks of text are known: found by their own tokens and those before, least recently used first out."""

from __future__ import annotations

import numpy as np

from dspark_jax.engine.prefix_cache import BLOCK, PrefixCache

A = list(range(100, 100 + 4 * BLOCK))
"""A text of four blocks."""


def saved(cache: PrefixCache, text: list[int], sound: bool = True) -> int:
    """Keeps all of a text; the number of blocks that had to be copied."""
    saving = cache.save(text, len(text))
    if saving is None:
        return 0
    cache.confirm(saving, sound)
    return len(saving.blocks)


def found(cache: PrefixCache, text: list[int]) -> int:
    """Tokens that are known of a text."""
    return BLOCK * len(cache.match(text, len(text)))


def test_a_text_is_found_in_whole_blocks_up_to_where_it_parts() -> None:
    """The token in which two texts part may be anywhere in a block: that block is not shared."""
    cache = PrefixCache(8)
    assert found(cache, A) == 0 and saved(cache, A[:-1]) == 3  # the last block is not full
    assert found(cache, A) == 3 * BLOCK and len(cache.match(A, 3 * BLOCK - 1)) == 2
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 3 * BLOCK - 1):
        other = A[:place] + [7] + A[place + 1 :]
        assert found(cache, other) == place // BLOCK * BLOCK


def test_a_block_is_another_one_behind_another_beginning() -> None:
    """The same 16 tokens at the same place: what a cache holds of them depends on what came before."""
    cache = PrefixCache(8)
    saved(cache, A)
    assert found(cache, [7] * BLOCK + A[BLOCK:]) == 0
    assert saved(cache, [7] * BLOCK + A[BLOCK:]) == 4 and len(cache) == 8
    rows = {block.row for text in (A, [7] * BLOCK + A[BLOCK:]) for block in cache.match(text, len(text))}
    assert rows == set(range(8))


def test_what_is_on_its_way_is_neither_found_nor_copied_twice() -> None:
    cache = PrefixCache(8)
    saving = cache.save(A, 2 * BLOCK)
    assert saving is not None and saving.first == 0
    assert found(cache, A) == 0 and cache.save(A, len(A)) is None
    cache.confirm(saving, True)
    more = cache.save(A, len(A))
    assert more is not None and (more.first, len(more.blocks)) == (2, 2)
    cache.confirm(more, True)
    assert cache.save(A, len(A)) is None and found(cache, A) == len(A)


def test_numbers_that_are_not_finite_are_forgotten_with_their_rows() -> None:
    cache = PrefixCache(4)
    saved(cache, A[:BLOCK])
    assert saved(cache, A, sound=False) == 3
    assert found(cache, A) == BLOCK and len(cache) == 1
    assert saved(cache, A) == 3 and found(cache, A) == len(A)


def test_the_least_recently_used_block_goes_first_and_never_one_with_others_behind_it() -> None:
    cache = PrefixCache(4)
    b, c, d = ([start] * BLOCK for start in (1, 2, 3))
    saved(cache, A[: 2 * BLOCK])
    saved(cache, b)
    saved(cache, c)
    assert found(cache, A[:BLOCK]) == BLOCK  # uses the first block of A alone
    saved(cache, d)
    assert [found(cache, text) for text in (A, b, c, d)] == [BLOCK, BLOCK, BLOCK, BLOCK]  # A's second one is gone
    found(cache, c)
    saved(cache, [4] * BLOCK)
    assert [found(cache, text) for text in (A, b, c, d)] == [0, BLOCK, BLOCK, BLOCK]


def test_a_text_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = PrefixCache(3)
    saved(cache, [9] * BLOCK)
    assert saved(cache, A) == 3 and found(cache, A) == 3 * BLOCK and found(cache, [9] * BLOCK) == 0
    assert saved(PrefixCache(0), A) == 0


def test_random_use_never_gives_a_row_to_two_blocks() -> None:
    """Texts of two letters meet and part everywhere; every block found is the text it is for."""
    rng = np.random.default_rng(0)
    cache = PrefixCache(11)
    hits = 0
    for _ in range(400):
        text = np.repeat(rng.integers(0, 2, 6), BLOCK).tolist()[: int(rng.integers(1, 6 * BLOCK))]
        blocks = cache.match(text, len(text))
        hits += len(blocks)
        assert [t for block in blocks for t in block.tokens] == text[: BLOCK * len(blocks)]
        saved(cache, text, sound=bool(rng.random() < 0.9))
        rows = [block.row for block in cache._used]
        assert len(set(rows)) == len(rows) <= 11 and sorted(rows + cache._free) == list(range(11))
    assert hits > 200
