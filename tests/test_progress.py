"""Progress in its plain form, without a terminal."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dspark_jax import progress
from dspark_jax.progress import Progress, clock


def test_a_resumed_count_estimates_from_its_own_pace(monkeypatch: Any, caplog: Any) -> None:
    """60 of 100 were done before; 20 more in 10 s leave 20, 10 s. The last unit is always reported."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), Progress(100, "texts", done=60, unit="text", bar=False) as bar:
        assert bar.eta_s() is None
        now[0] = 10.0
        bar.advance(20, "1.5 tokens/s")
        assert bar.eta_s() == pytest.approx(10.0) and not caplog.records
        assert bar.line() == "texts: 80/100 text, 0:10 left, 1.5 tokens/s"
        bar.advance(20)
    assert [r.message for r in caplog.records] == ["texts: 100/100 text, 0:00 left, 1.5 tokens/s"]


def test_clock() -> None:
    assert [clock(x) for x in (5.4, 65, 3661)] == ["0:05", "1:05", "1:01:01"]
