"""Step times of hardware that is not here: the formula by hand, the published shapes, the shipped tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.roofline import (
    CONTEXTS,
    H100_SXM,
    QWEN3,
    SLOTS,
    Chip,
    Decoder,
    Draft,
    draft_ms,
    roofline_table,
    step_ms,
    token_sizes,
)

SHIPPED = Path(__file__).parents[2] / "configs" / "step_time"

TINY = Decoder(layers=3, hidden=4, heads=2, key_heads=1, head_dim=2, intermediate=5, vocab=7)


def test_parameters_of_the_targets_are_those_of_their_checkpoints() -> None:
    """Qwen3's model cards: 3.6, 6.95 and 13.2 billion parameters without embeddings, 4.0, 8.2 and 14.8 with them
    (4B ties embedding and head)."""
    inside = {name: shapes.layers * shapes.layer_parameters / 1e9 for name, shapes in QWEN3.items()}
    assert inside == pytest.approx({"qwen3-4b": 3.6, "qwen3-8b": 6.95, "qwen3-14b": 13.2}, rel=0.01)
    whole = {name: inside[name] + (1 + (name != "qwen3-4b")) * s.head_parameters / 1e9 for name, s in QWEN3.items()}
    assert whole == pytest.approx({"qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8}, rel=0.01)


def test_a_step_by_hand() -> None:
    """A layer: queries and output 2 * 4 * 4, keys and values 2 * 4 * 2, MLP 3 * 4 * 5: 108; three of them and the
    head: 352. Memory alone (peak without end): 704 bytes, caches 2 * 3 * 2 slots * 10 cells * 2 * 2 bytes = 480,
    logits 8 * 4 tokens * 7 = 224. Arithmetic alone: 2 * 4 * 352 and 4 * 3 * 4 tokens * 10 cells * 4."""
    slow_memory, slow_arithmetic = Chip("", 1e3, 1e99), Chip("", 1e99, 1e3)
    assert step_ms(TINY, slow_memory, 4, 2, 10) == pytest.approx(704 + 480 + 224)
    assert step_ms(TINY, slow_arithmetic, 4, 2, 10) == pytest.approx(2816 + 1920)
    # Each part takes the longer of its two times: matmuls 2816, attention 1920, logits 224.
    assert step_ms(TINY, Chip("", 1e3, 1e3), 4, 2, 10) == pytest.approx(2816 + 1920 + 224)
    assert step_ms(TINY, slow_memory, 4, 2, 10, efficiency=0.5) == pytest.approx(2 * (704 + 480 + 224))


def test_a_draft_by_hand() -> None:
    """Blocks of 2 for 3 slots: 6 tokens, 9 taken in. Absorb: 5 taps * 16 + keys and values of a layer 2 * 4 * 2 = 96;
    backbone 108 + 28; caches 2 * 1 * 3 * 10 * 2 * 2 bytes; logits 8 * 6 * 7; the head's 7 x 3 matrix twice."""
    draft = Draft(layers=1, block=2, taps=5, rank=3)
    assert draft_ms(TINY, draft, Chip("", 1e3, 1e99), 3, 10) == pytest.approx(192 + 272 + 240 + 336 + 2 * 42)
    flops = 2 * 9 * 96 + 2 * 6 * 136 + 4 * 1 * 6 * 10 * 4 + 2 * (2 * 3 * 21)
    assert draft_ms(TINY, draft, Chip("", 1e99, 1e3), 3, 10) == pytest.approx(flops)


def test_one_request_waits_for_the_weights_and_many_for_arithmetic() -> None:
    """Qwen3-8B on an H100: 15.1 GB in 3.35 TB/s are 4.5 ms, so up to 8 tokens cost one request as good as nothing;
    with 1024 requests, whose caches take 23 ms to read, eight times the tokens cost more than three times as much."""
    model = QWEN3["qwen3-8b"]
    assert step_ms(model, H100_SXM, 1, 1, 512) == pytest.approx(4.55, abs=0.05)
    assert step_ms(model, H100_SXM, 8, 1, 512) < 1.01 * step_ms(model, H100_SXM, 1, 1, 512)
    assert step_ms(model, H100_SXM, 8192, 1024, 512) > 3 * step_ms(model, H100_SXM, 1024, 1024, 512)


def test_token_sizes_hold_whole_blocks() -> None:
    assert token_sizes(4, 3) == [4, 6, 8, 10, 12, 14, 16]
    assert token_sizes(1, 7) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_table_without_a_drafter_and_a_wrong_efficiency() -> None:
    table = roofline_table(TINY, None, H100_SXM, slots=[2], contexts=[10])
    assert table.tokens.tolist() == [2] and table.draft_ms is None
    with pytest.raises(ValueError, match="efficiency"):
        roofline_table(TINY, None, H100_SXM, efficiency=1.5)


@pytest.mark.parametrize("efficiency", [1.0, 0.6])
@pytest.mark.parametrize("name", QWEN3)
def test_shipped_tables_are_what_the_formula_gives(name: str, efficiency: float) -> None:
    """Read by the engine's own reader, monotone in tokens, with a row for every slot bucket and context."""
    table = StepTimeTable.load(SHIPPED / f"h100-sxm_{name}_{efficiency:g}.json")
    assert table == roofline_table(QWEN3[name], Draft(), H100_SXM, efficiency=efficiency, name=name)
    assert {(row.slots, row.context_tokens) for row in table.rows} == {(s, c) for s in SLOTS for c in CONTEXTS}
    for row in table.rows:
        assert (np.diff(row.milliseconds) >= 0).all() and row.tokens[0] == row.slots
