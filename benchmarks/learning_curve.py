"""How does the accepted length of a drafter grow with the positions it was trained on, and where would that lead?

    python benchmarks/learning_curve.py --run runs/smollm2 --to 12e6 --out benchmarks/results/learning_curve_smollm2 \
        --rolled-out 751770=1.402 --rolled-out 2083788=1.469 --rolled-out-what "greedy, 5 drafts, 40 MT-Bench prompts"

Reads the held-out lines of a run's ``metrics.jsonl``: expected accepted length along others' text at temperature 1
(``tau``) and for arg-max (``greedy``). Each is fitted as ``a + b log2(positions)`` by least squares, and carried on to
``--to`` positions with the 95 % interval of the line there and of a single measurement. The interval knows the scatter
about the line and nothing else: that the points come from one run, and that a curve may bend, is not in it. Points
under a falling learning rate lie above the others and are marked; the line through the ends of such stretches is given,
too, without an interval where there are only two.

A run that started from an earlier drafter (``drafter.start_from``) counts that drafter's positions on: the points of
the earlier run come from its result file, ``--earlier``.

Rolled-out points are accepted lengths of decoded text, from ``scripts/evaluate.py`` or ``bench_decode.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import environment
from scipy import stats

from dspark_jax.evaluate import figures

FALLING = 0.95
"""A learning rate below this share of the run's highest, behind the warm-up, is falling."""


def held_out(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A point for every held-out line behind step 0: step, positions, values by width, whether the rate was falling,
    and whether the next point's is not (the end of a stretch)."""
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    highest = max(rates.values(), default=0.0)
    warm = min((step for step, rate in rates.items() if rate == highest), default=0)
    points: list[dict[str, Any]] = []
    for line in lines:
        if "heldout" not in line or line["step"] <= 0:  # what another run has ended with, or nothing learnt yet
            continue
        if points and points[-1]["step"] == line["step"]:  # a run that was started again behind its end
            points.pop()
        before = [step for step in rates if step <= line["step"]]
        falling = bool(before) and max(before) > warm and rates[max(before)] < FALLING * highest
        widths = {
            name.removeprefix("width_"): {key: values[key] for key in ("tau", "greedy", "blocks")}
            for name, values in line["heldout"].items()
        }
        points.append({"step": line["step"], "positions": line["positions"], "falling": falling, "widths": widths})
    for point, following in zip(points, [*points, None][1:], strict=True):
        point["end"] = point["falling"] and (following is None or not following["falling"])
    return points


def read_earlier(path: Path, before: float) -> list[dict[str, Any]]:
    """The points of a result file. Raises ValueError where it is none, or does not end ``before`` the run begins."""
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
        last = max(point["positions"] for point in points)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--earlier {path}: no result of this command ({error})") from error
    if last > before:
        raise ValueError(f"--earlier {path}: ends at {last:.0f} positions, but the run begins at {before:.0f}")
    return points


def fit(positions: Sequence[float], values: Sequence[float], to: float) -> dict[str, Any] | None:
    """Least squares of ``values`` on log2(positions), carried on to ``to``; None for fewer than two positions."""
    x, y = np.log2(np.asarray(positions, float)), np.asarray(values, float)
    if len(np.unique(x)) < 2:
        return None
    b, a = np.polyfit(x, y, 1)
    at, n = np.log2(to), len(x)
    found = {"points": n, "per_doubling": round(float(b), 4), "at": to, "value": round(float(a + b * at), 3)}
    if n < 3:
        return found
    scatter = np.sqrt(((y - a - b * x) ** 2).sum() / (n - 2))
    spread = ((x - x.mean()) ** 2).sum()
    t = stats.t.ppf(0.975, n - 2)
    line = t * scatter * np.sqrt(1 / n + (at - x.mean()) ** 2 / spread)
    single = t * scatter * np.sqrt(1 + 1 / n + (at - x.mean()) ** 2 / spread)
    slope = t * scatter / np.sqrt(spread)
    found["per_doubling_interval"] = [round(float(b - slope), 4), round(float(b + slope), 4)]
    found["interval_of_line"] = [round(float(a + b * at - line), 3), round(float(a + b * at + line), 3)]
    found["interval_of_point"] = [round(float(a + b * at - single), 3), round(float(a + b * at + single), 3)]
    return found


def curve(points: list[dict[str, Any]], rolled: list[tuple[float, float]], to: float) -> dict[str, Any]:
    """All fits."""
    fits: dict[str, Any] = {}
    for width in points[0]["widths"]:
        for key in ("tau", "greedy"):
            for which, chosen in (("all", points), ("ends", [p for p in points if p["end"]])):
                values = [p["widths"][width][key] for p in chosen]
                found = fit([p["positions"] for p in chosen], values, to) if chosen else None
                fits.setdefault(f"width {width}, {key}", {})[which] = found
    if rolled:
        fits["rolled out"] = {"all": fit([x for x, _ in rolled], [y for _, y in rolled], to)}
    return fits


def draw(path: Path, points: list[dict[str, Any]], rolled: list[tuple[float, float]], what: str, to: float) -> None:
    """The curve of the widest block, both measures, and what was rolled out."""
    width = max(points[0]["widths"], key=int)

    def panels(axes: Any) -> None:
        for ax, key in zip(axes[0], ("tau", "greedy"), strict=True):
            x = np.array([p["positions"] for p in points]) / 1e6
            y = np.array([p["widths"][width][key] for p in points])
            falling = np.array([p["falling"] for p in points])
            ax.scatter(x[~falling], y[~falling], s=14, label="held out")
            ax.scatter(x[falling], y[falling], s=18, marker="^", label="held out, rate falling")
            grid = np.geomspace(x.min(), to / 1e6, 60)
            bands = [fit(x * 1e6, y, 1e6 * g) for g in grid]
            if bands[0] is not None:
                ax.plot(grid, [band["value"] for band in bands if band], linewidth=1, color="grey", label="fit")
                ends = [band.get("interval_of_line") for band in bands if band]
                if all(ends):
                    ax.fill_between(grid, *np.array(ends, float).T, color="grey", alpha=0.15)
            if rolled and key == "greedy":
                ax.scatter(*np.array([(a / 1e6, b) for a, b in rolled]).T, marker="s", s=18, label=what or "rolled out")
            ax.set_xscale("log")
            ax.set_xlabel("positions, millions")
            ax.set_ylabel(f"accepted length, block {width}, {key}")
            ax.legend(fontsize=7)

    figures.save(path, 2, 1, panels)


def rolled_out(text: str) -> tuple[float, float]:
    """``751770=1.402``: positions and accepted length. Raises ValueError."""
    positions, _, length = text.partition("=")
    return float(positions), float(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a training run")
    parser.add_argument("--to", type=float, default=12e6, help="positions to carry the fits on to")
    parser.add_argument("--earlier", type=Path, help="result (JSON) of the run that this one started from")
    parser.add_argument("--rolled-out", type=rolled_out, action="append", default=[], metavar="POSITIONS=LENGTH")
    parser.add_argument("--rolled-out-what", default="", help="how those were measured")
    parser.add_argument("--out", type=Path, required=True, help="result without ending: OUT.json and OUT.png")
    args = parser.parse_args()
    if not (args.run / "metrics.jsonl").is_file():
        parser.error(f"{args.run}: no metrics.jsonl here; --run takes the --out of scripts/train.py")
    text = (args.run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.split("\n")[:-1] if line.strip()]
    points = held_out(lines)
    if not points:
        parser.error(f"{args.run / 'metrics.jsonl'}: no held-out measurement behind step 0")
    if args.earlier is not None:
        begun = next((line["positions"] for line in lines if "heldout" in line and line["step"] == 0), 0.0)
        try:
            points = read_earlier(args.earlier, begun) + points
        except ValueError as error:
            parser.error(str(error))
    known = environment()
    content = {
        "command": f"python benchmarks/learning_curve.py --run RUN --to {args.to:g}",
        "commit": known["commit"],
        "points": points,
        "rolled_out": {"how": args.rolled_out_what, "points": args.rolled_out},
        "fits": curve(points, args.rolled_out, args.to),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(args.out.with_suffix(".png"), points, args.rolled_out, args.rolled_out_what, args.to)
    for name, found in content["fits"].items():
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
