"""benchmarks/argmax_gaps.py: the arithmetic of its report, by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module; its neighbours are found as when it is run as a script."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    for name in ("argmax_gaps", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import argmax_gaps

    return argmax_gaps


def test_the_gap_is_the_likeliest_minus_the_second(bench: ModuleType) -> None:
    """A clear winner, a tie, and negative logits."""
    logits = np.asarray([[1.0, 4.0, 2.5], [3.0, 3.0, 0.0], [-9.0, -7.5, -8.0]], np.float32)
    np.testing.assert_allclose(bench.gaps(logits), [1.5, 0.0, 0.5])


def test_texts_part_at_their_first_different_token(bench: ModuleType) -> None:
    """Equal texts do not part; a text that is the beginning of the other parts at its end."""
    text = np.asarray([5, 6, 7, 8])
    assert bench.first_difference(text, text) is None
    assert bench.first_difference(text, np.asarray([5, 6, 9, 8])) == 2
    assert bench.first_difference(text, text[:3]) == 3


def test_the_report_counts_shares_and_names_the_widest_gap_at_a_parting(bench: ModuleType) -> None:
    """Four gaps, two of them below 0.1; two partings of gaps 0.02 and 0.3."""
    parted = [{"prompt": 0, "gap": 0.02}, {"prompt": 2, "gap": 0.3}]
    out = bench.report(np.asarray([0.02, 0.05, 0.3, 2.0]), parted, 5)
    assert out["share_below"]["0.1"] == 0.5 and out["share_below"]["1.0"] == 0.75
    assert (out["texts"], out["texts_that_part"], out["widest_gap_where_texts_part"]) == (5, 2, 0.3)
    assert bench.report(np.ones(3), [], 1)["widest_gap_where_texts_part"] is None
