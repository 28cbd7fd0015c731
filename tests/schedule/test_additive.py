"""The additive model of step times: exact where it holds, monotone, and honest about where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.schedule.additive import fit


def test_a_sum_of_both_parts_is_recovered() -> None:
    """30 + 2 T + 0.01 cells: every step is told exactly, also one between the measured numbers of tokens."""
    tokens = [1, 1, 8, 8, 64]
    cells = [512, 2048, 512, 4096, 4096]
    model = fit(tokens, cells, [30 + 2 * t + 0.01 * c for t, c in zip(tokens, cells, strict=True)])
    assert model.cell_ms == pytest.approx(0.01)
    for t, c in ((1, 4096), (8, 100), (36, 0), (64, 8192)):
        assert model.ms(t, c) == pytest.approx(30 + 2 * t + 0.01 * c)
    assert model.worst_error([8, 36], [1, 7], [46.01, 102.07]) < 1e-12
    assert model.worst_error([8], [0], [23.0]) == pytest.approx(1.0)  # 46 told, 23 measured
    assert model.worst_error([], [], []) == 0.0


def test_cells_are_free_where_no_two_steps_differ_in_them_alone() -> None:
    model = fit([1, 8], [512, 4096], [10.0, 20.0])
    assert model.cell_ms == 0.0 and model.ms(8, 9999) == 20.0


def test_the_tokens_part_never_falls_and_the_cells_part_is_never_negative() -> None:
    model = fit([1, 2, 4, 4], [1, 1, 1, 100], [10.0, 8.0, 12.0, 11.0])
    assert model.cell_ms == 0.0
    assert (np.diff(model.tokens_ms) >= 0).all()


def test_what_is_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        fit([1, 2], [1], [1.0, 2.0])
    with pytest.raises(ValueError, match="milliseconds"):
        fit([1], [1], [0.0])
