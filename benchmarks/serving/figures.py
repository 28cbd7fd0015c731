"""The paper's two pictures of serving (Figures 7 and 8): throughput against speed a user, budget against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.evaluate import figures

Row = Mapping[str, Any]


def serving_figure(path: Path, rows: Sequence[Row], title: str, log: bool) -> None:
    """Writes a PNG; where matplotlib is missing the log says so.

    Args:
        rows: with ``arm``, ``concurrency``, ``tokens_per_s``, ``tokens_per_s_user``, ``drafts_per_request``.
        log: throughput on a logarithmic axis.
    """

    def draw(grid: Any) -> None:
        left, right = grid[0]
        for name in dict.fromkeys(row["arm"] for row in rows):
            own = sorted((row for row in rows if row["arm"] == name), key=lambda row: row["concurrency"])
            style = {"linewidth": 2.2, "color": "black", "zorder": 3} if name == "adaptive" else {"linewidth": 1.0}
            speed = [row["tokens_per_s_user"] for row in own]
            left.plot(speed, [row["tokens_per_s"] for row in own], marker="o", markersize=3, label=name, **style)
            budget = [1 + (row["drafts_per_request"] or 0.0) for row in own]
            right.plot([row["concurrency"] for row in own], budget, marker="o", markersize=3, **style)
        left.set_xlabel("tokens/s/user")
        left.set_ylabel("tokens/s")
        right.set_xlabel("concurrent requests")
        right.set_ylabel("drafts + 1, a request and cycle")
        right.set_xscale("log", base=2)
        if log:
            left.set_yscale("log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        left.legend(fontsize=7)
        left.set_title(title, fontsize=9)

    path.parent.mkdir(parents=True, exist_ok=True)
    figures.save(path, 2, 1, draw)
