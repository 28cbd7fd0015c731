"""Tables and figures of an evaluation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.evaluate import figures, report
from dspark_jax.evaluate.acceptance import LEAST_TRIES
from dspark_jax.evaluate.decode import Trace


def traces(drafts: int, seed: int, cycles: int = 60) -> list[Trace]:
    """Three prompts; a draft is accepted with probability 0.8."""
    rng, found = np.random.default_rng(seed), []
    for index in range(3):
        kept = 1 + np.cumprod(rng.random((cycles, drafts)) < 0.8, axis=1).sum(1)
        tokens = (0,) * int(1 + kept.sum())
        found.append(Trace("a", index, tokens, tuple(map(int, kept)), (drafts,) * cycles, "length", 1.0, len(tokens)))
    return found


def test_numbers_in_a_row_are_one_span() -> None:
    assert report.spans([2, 3, 4, 6, 8, 9]) == "2-4, 6, 8-9" and report.spans([]) == ""


def test_positions_are_shown_with_their_tries_and_ratios_with_their_positions() -> None:
    """A block of five drafts against one of three: both ratios take positions 2 and 3, its own mean all of 2 to 5.
    177 blocks were offered (three prompts, the last cycle of each left out)."""
    found = {"first": traces(3, 0), "mine": traces(5, 1)}
    samples = {name: report.Sample(found[name], drafts, {}) for name, drafts in (("first", 3), ("mine", 5))}
    first, mine = report.measure(samples, found, 100)
    assert first["tried"][0] == mine["tried"][0] == 177 and mine["tried"][4] >= LEAST_TRIES
    assert mine["later_mean"]["positions"] == [2, 3, 4, 5]
    assert mine["later_pooled_ratio"]["positions"] == mine["later_mean_ratio"]["positions"] == [2, 3]
    assert not [name for name in first if name.endswith("_ratio")]
    text = report.positions_table([first, mine])
    assert "| tries of position | 1 | 2 | 3 | 4 | 5 |" in text
    assert f"| mine | {' | '.join(map(str, mine['tried']))} |" in text
    assert f"| first | {' | '.join(map(str, first['tried']))} |  |  |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| mine | 0.")]
    assert re.search(r"\] \(2-3\) \| [^|]*\(2-5\) \| [^|]*\(2-3\) \|$", row)


def test_a_figure_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    """A set in which no cycle counted has no accepted length."""
    pytest.importorskip("matplotlib")
    nothing, some = ({"value": x, "low": x, "high": x} for x in (None, 1.5))
    row = {"name": "x", "tau": {"a": nothing, "macro": some, "all": some}, "conditional": [some, nothing]}
    assert figures.acceptance(tmp_path / "a.png", "greedy", [row]) and (tmp_path / "a.png").stat().st_size > 1000
