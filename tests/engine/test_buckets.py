"""Which programs exist: within the budget, and enough of them for every cycle and every prompt."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_jax.engine import EngineConfig
from dspark_jax.engine.buckets import Buckets, Key, plan_buckets


def plan(*, drafts: int = 7, budget: int = 24, look: int = 1, **config: Any) -> Buckets:
    mode = {name: config.pop(name, False) for name in ("variable", "skips")}
    settings = EngineConfig(**config)
    return plan_buckets(settings, window=settings.max_model_len, drafts=drafts, budget=budget, look=look, **mode)


MODES = {
    "fixed": {},
    "threshold": {"variable": True},
    "lagged": {"variable": True, "skips": True},
    "none": {"drafts": 0},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [1, 3, 8, 32, 256])
def test_the_budget_holds_at_any_size(mode: str, slots: int) -> None:
    """24 programs on CPU for the demo's 8 x 2048 tokens (DESIGN section 2), and for any other number of slots."""
    buckets = plan(max_num_seqs=slots, **MODES[mode])
    keys = buckets.keys(2047)
    assert len(keys) == len(set(keys)) <= 24
    assert buckets.slots[0] == 1 and buckets.slots[-1] == slots


def test_the_demo_s_programs_at_fixed_length() -> None:
    """One request alone has its own programs; short contexts have theirs."""
    buckets = plan(drafts=5)
    assert buckets.slots == (1, 2, 4, 8) and buckets.contexts == (512, 2112)
    assert buckets.contexts_of(1) == (256, 512, 2112) and buckets.contexts_of(2) == (512, 2112)
    assert buckets.tokens == {1: (6,), 2: (12,), 4: (24,), 8: (48,)}
    assert len(buckets.keys(2047)) == 23


def test_what_is_left_of_the_budget_goes_into_finer_verify_sizes() -> None:
    assert plan(drafts=5, budget=25).tokens[8] == (36, 48)


def test_an_adaptive_mode_has_sizes_to_choose_from() -> None:
    """A request alone: none, half a block or a whole one; many: none or about two drafts each. Slot buckets come
    before finer sizes and before contexts of the draft: few requests must not pay for the slots of many."""
    buckets = plan(**MODES["lagged"])
    assert buckets.slots == (1, 4, 8) and buckets.contexts == (512, 2112) and buckets.draft_contexts == (2112,)
    assert buckets.tokens == {1: (4, 8), 4: (13,), 8: (24,)}
    assert [buckets.tokens[slots][-1] - slots for slots in buckets.slots] == [7, 9, 16]
    kinds = {"admit", "copy", "absorb", "prefill", "draft", "verify", "plain"}
    assert {key.kind for key in buckets.keys(2047)} == kinds and len(buckets.keys(2047)) == 24
    assert plan(**MODES["threshold"]).tokens[8][-1] == 64  # nothing else bounds its lengths


@pytest.mark.parametrize("slots", [1, 3, 8, 32])
@pytest.mark.parametrize(("drafts", "look"), [(1, 1), (2, 1), (7, 1), (5, 5), (7, 3)])
def test_a_probe_reaches_every_request(slots: int, drafts: int, look: int) -> None:
    """Some verify size has room for that many drafts of everyone, or nobody would learn what the last ones do."""
    for size, tokens in plan(max_num_seqs=slots, drafts=drafts, look=look, **MODES["lagged"]).tokens.items():
        assert tokens[-1] >= size * (1 + look)


@pytest.mark.parametrize("window", [2, 17, 64, 65, 100, 257, 1030])
@pytest.mark.parametrize("prefill", [None, (8, 16), (5,), (6, 7, 40)])
def test_every_write_fits_into_the_cache_and_every_piece_has_a_program(
    window: int, prefill: tuple[int, ...] | None
) -> None:
    """A dynamic update that does not fit clamps, and overwrites valid cells without a word. A piece may begin anywhere,
    behind a known prefix, and be cut to what a step has room for."""
    buckets = plan(max_model_len=window, prefill_buckets=prefill)
    keys = set(buckets.keys(window - 1))
    assert window - 1 + buckets.width <= buckets.cells
    used = set()
    for length in {1, 2, window // 2, window - 2, window - 1} - {0}:
        for start in range(length):
            for room in (None, 0, *buckets.prefill):
                piece = buckets.piece(start, length, room)
                assert piece.start == start and 1 <= piece.count <= piece.size
                assert piece.count == min(piece.size, length - start)
                assert start + piece.size <= piece.context <= buckets.cells
                assert piece.size <= max(room or piece.size, buckets.prefill[0])
                used.add((piece.size, piece.context))
    assert used == {(key.tokens, key.context) for key in keys if key.kind == "prefill"}  # and none for nothing
    for length in range(1, window):
        begin, sizes = 0, []
        while (
            begin < length
        ):  # where nothing else needs room: the largest pieces, then the smallest that holds the rest
            piece = buckets.piece(begin, length)
            begin, sizes = begin + piece.count, [*sizes, piece.size]
        assert begin == length and sizes == sorted(sizes, reverse=True)


def test_keeping_prefixes_costs_no_program_where_requests_move() -> None:
    """One program copies a tenant to another slot, blocks into the store and out of it; with a single slot bucket
    nobody moves, and it is one more."""
    for slots, more in ((8, 0), (1, 1)):
        settings = EngineConfig(max_num_seqs=slots)
        without, kept = (
            plan_buckets(
                settings, window=2048, drafts=7, variable=True, skips=True, budget=24, stored_blocks=stored
            ).keys(2047)
            for stored in (0, 256)
        )
        assert len(kept) == len(without) + more <= 24 and Key("copy") in kept


@pytest.mark.parametrize("mode", ["fixed", "lagged"])
def test_every_cycle_has_a_program_that_holds_it(mode: str) -> None:
    buckets = plan(max_num_seqs=6, drafts=4, **MODES[mode])
    keys = set(buckets.keys(2047))
    for running in range(1, 7):
        slots = buckets.slot_bucket(running)
        most = buckets.tokens[slots][-1] - running
        assert most >= (4 * running if mode == "fixed" else running)
        for drafts in [4 * running] if mode == "fixed" else range(1, most + 1):
            tokens = buckets.token_bucket(slots, running + drafts)
            assert running + drafts <= tokens
            for context in buckets.contexts_of(slots):
                assert Key("verify", slots, tokens, context) in keys
                assert Key("draft", slots, 0, buckets.draft_context(context)) in keys


@pytest.mark.parametrize("mode", ["fixed", "threshold", "lagged"])
def test_no_forward_is_larger_than_a_step(mode: str) -> None:
    """What a step may hold bounds the verify sizes; but for that everybody gets a token, and where cycles without
    drafts have a program of their own a draft more."""
    for limit in (4, 9, 20, 40):
        tokens = plan(drafts=7, max_num_batched_tokens=limit, **MODES[mode]).tokens
        for slots, sizes in tokens.items():
            assert slots <= sizes[0] and sizes[-1] <= max(limit, slots + (mode == "lagged"))
            assert mode == "lagged" or sizes[-1] == max(min(8 * slots, limit), slots)
    assert plan(drafts=7, max_num_batched_tokens=64, **MODES[mode]) == plan(drafts=7, **MODES[mode])


def test_named_buckets_are_taken_as_they_are() -> None:
    buckets = plan(
        slot_buckets=(2,), token_buckets=(4, 16, 40), context_buckets=(128, 9999), prefill_buckets=(32,), budget=1
    )
    assert buckets.slots == (2, 8) and buckets.prefill == (32,) and buckets.contexts[0] == 128
    assert buckets.tokens == {2: (4, 16), 8: (16, 40, 64)}


def test_what_is_too_large_is_an_error() -> None:
    buckets = plan()
    with pytest.raises(ValueError, match="9 slots exceed the largest bucket of 8"):
        buckets.slot_bucket(9)


def test_a_key_names_its_sizes() -> None:
    assert str(Key("verify", 1, 6, 512)) == "verify slots=1 tokens=6 context=512"
    assert str(Key("admit")) == "admit"
