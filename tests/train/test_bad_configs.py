"""Training settings that cannot go together are refused where they are read, by the name of the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_jax.train.config import DataConfig, DrafterShape


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch": 0}, "batch must be positive"),
        ({"heldout_batches": 0}, "heldout_batches must be positive, found 0"),
        ({"anchors": 160, "length": 64}, "anchors = 160 blocks do not begin at 64 tokens"),
        ({"anchors": 32, "heldout_anchors": 65, "length": 64}, "heldout_anchors = 65"),
    ],
)
def test_counts_that_no_batch_can_have_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DataConfig(Path("a"), Path("b"), **values)


def test_a_chain_has_no_markov_head_of_another_kind_either() -> None:
    """What would be ignored is refused, and the message begins with the key."""
    with pytest.raises(ValueError, match="^method = eagle3: .*markov_head = gated"):
        DrafterShape(1, (0,), method="eagle3", confidence_head=False, markov_rank=0, markov_head="gated")


def test_a_negative_number_of_records_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bigram_records must be 0 \(all\) or more, found -1"):
        DrafterShape(1, (0,), bigram_records=-1)
