"""PNG figures. They need matplotlib (extra ``train``); without it a figure is left out and the log says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LOG = logging.getLogger("dspark_jax.evaluate")


def save(path: Path, columns: int, rows: int, draw: Callable[[Any], None]) -> bool:
    """Lets ``draw(axes [rows, columns])`` fill a figure and writes it. False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        LOG.warning("%s is left out: matplotlib is not installed (pip install matplotlib)", path)
        return False
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.subplots(rows, columns, squeeze=False))
    figure.savefig(path, dpi=120)
    return True


def acceptance(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Accepted length by prompt set, and conditional acceptance by position, of drafters side by side."""

    def draw(axes: Any) -> None:
        left, right = axes[0]
        names = [name for name in rows[0]["tau"] if name != "all"]
        step = 0.8 / len(rows)
        for i, row in enumerate(rows):
            values = [row["tau"][name] for name in names]
            x = np.arange(len(names)) - 0.4 + step * (i + 0.5)
            # None, where nothing could be measured, becomes NaN: no bar.
            height, low, high = (np.array([v[key] for v in values], float) for key in ("value", "low", "high"))
            left.bar(
                x, height, step * 0.95, yerr=[np.maximum(height - low, 0), np.maximum(high - height, 0)], capsize=2
            )
            k = np.arange(1, len(row["conditional"]) + 1)
            known = np.array([v["value"] for v in row["conditional"]], float)
            spread = [[v[end] for v in row["conditional"]] for end in ("low", "high")]
            (line,) = right.plot(k, known, marker="o", markersize=3, label=row["name"])
            right.fill_between(k, *np.array(spread, float).reshape(2, -1), alpha=0.15, color=line.get_color())
        left.set_xticks(np.arange(len(names)), names, rotation=30)
        left.set_ylabel("accepted length")
        left.set_ylim(bottom=1.0)
        left.set_title(title)
        right.set_xlabel("position in the block")
        right.set_ylabel("conditional acceptance")
        right.set_ylim(0, 1)
        right.legend(fontsize=7)

    return save(path, 2, 1, draw)


def threshold_sweep(path: Path, sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Accepted length and acceptance rate against the confidence threshold, one line a drafter (Figure 5)."""

    def draw(axes: Any) -> None:
        for ax, key, label in zip(axes[0], ("tau", "rate"), ("accepted length", "accepted of offered"), strict=True):
            for name, rows in sweeps.items():
                x = [row["threshold"] for row in rows]
                (line,) = ax.plot(x, [row[key]["value"] for row in rows], marker="o", markersize=3, label=name)
                ends = [[row[key][end] for row in rows] for end in ("low", "high")]
                ax.fill_between(x, *np.array(ends, float), alpha=0.15, color=line.get_color())
            ax.set_xlabel("confidence threshold")
            ax.set_ylabel(label)
        axes[0][0].legend(fontsize=7)

    return save(path, 2, 1, draw)


def reliability(
    path: Path, title: str, shown: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]]
) -> bool:
    """Reliability of prefix survival, one panel a position, before and after scaling (the paper's Figure 6).

    Args:
        shown: ``calibrate.assess.diagram``.
    """
    positions = len(shown["before"])
    columns = min(positions, 4)
    rows = -(-positions // columns)

    def draw(axes: Any) -> None:
        for ax in axes.flat[positions:]:
            ax.axis("off")
        for k, ax in enumerate(axes.flat[:positions]):
            ax.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for name, points in shown.items():
                count, score, label = points[k]
                there = count > 0
                size = 10 + 90 * count[there] / count.sum()
                (line,) = ax.plot(score[there], label[there], linewidth=1, label=name)
                ax.scatter(score[there], label[there], s=size, color=line.get_color())
            ax.set_title(f"{title}: position {k + 1}", fontsize=8)
            ax.set_xlim(0, 1)
            ax.set_ylim(0, 1)
        axes[0][0].set_xlabel("predicted survival")
        axes[0][0].set_ylabel("observed survival")
        axes[0][0].legend(fontsize=7)

    return save(path, columns, rows, draw)
