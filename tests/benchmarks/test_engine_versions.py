"""The comparison of two checkouts: its figures, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import bench_engine_versions as versions
import pytest


def test_the_ratio_is_that_of_the_medians_and_texts_are_compared() -> None:
    """Medians 20 and 30; the rounds' own ratios are listed, an outlier among them."""
    speeds = [(10.0, 30.0), (20.0, 60.0), (40.0, 20.0)]
    rounds = [tuple({"none": {"tokens_per_s": x, "texts": [[1, 2]]}} for x in pair) for pair in speeds]
    figures = versions.compare(rounds)["none"]  # type: ignore[arg-type]
    assert (figures["before_tokens_per_s"], figures["after_tokens_per_s"]) == (20.0, 30.0)
    assert figures["ratio_of_medians"] == 1.5 and figures["ratios_of_rounds"] == [0.5, 3.0, 3.0]
    assert figures["texts_equal"]
    rounds[1][1]["none"]["texts"] = [[1, 3]]
    assert not versions.compare(rounds)["none"]["texts_equal"]  # type: ignore[arg-type]


def test_a_folder_without_the_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkout of this project"):
        versions.Checkout(tmp_path, [])
