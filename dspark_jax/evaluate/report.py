"""One report of many drafters: ``results.json``, ``report.md`` and PNG figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.evaluate import figures
from dspark_jax.evaluate.acceptance import Sample, bootstrap_weights, interval, quotient, value
from dspark_jax.evaluate.config import PLAIN
from dspark_jax.evaluate.decode import Trace
from dspark_jax.whole_file import write_whole


def row(name: str, traces: Sequence[Trace], sample: Sample, weights: np.ndarray) -> dict[str, Any]:
    """Everything measured of one drafter under one way of sampling."""
    point, spread = sample.statistics(), sample.statistics(weights)
    ends = {key: interval(values) for key, values in spread.items()}

    def scalar(key: str) -> dict[str, float | None]:
        return value(float(point[key][0]), float(ends[key][0]), float(ends[key][1]))

    emitted, seconds = sum(t.emitted for t in traces), sum(t.seconds for t in traces)
    return {
        "name": name,
        "tau": {key.removeprefix("tau/"): scalar(key) for key in point if key.startswith("tau/")},
        "conditional": [
            value(*map(float, triple)) for triple in zip(point["conditional"][0], *ends["conditional"], strict=True)
        ],
        "later": scalar("later"),
        "later_pooled": scalar("later_pooled"),
        "rate": scalar("rate"),
        "offered": scalar("offered"),
        "histogram": sample.histogram.astype(int).tolist(),
        "tokens_per_s": round(emitted / seconds, 2) if seconds else None,
        "tokens": sum(len(t.tokens) for t in traces),
        "cycles": int(sample.cycles.sum()),
        "prompts": len(traces),
    }


def compare(
    rows: list[dict[str, Any]],
    traces: Mapping[str, Sequence[Trace]],
    samples: Mapping[str, Sample],
    weights: np.ndarray,
) -> None:
    """Adds to every row what it is against the plain one and against the first drafter, in place.

    ``speed`` (tokens/s over the plain row's), ``equal_texts``; ``tau_ratio``, ``later_ratio`` and
    ``later_pooled_ratio`` to the first drafter, with intervals of the same resampled prompts.
    """
    plain = next((r for r in rows if r["name"] == PLAIN), None)
    drafters = [r for r in rows if r["name"] != PLAIN]
    for entry in rows:
        if plain is not None and plain["tokens_per_s"] and entry["tokens_per_s"]:
            entry["speed"] = round(entry["tokens_per_s"] / plain["tokens_per_s"], 3)
            pairs = zip(traces[entry["name"]], traces[PLAIN], strict=True)
            entry["equal_texts"] = sum(a.tokens == b.tokens for a, b in pairs)
    for entry in drafters[1:]:
        mine, first = samples[entry["name"]], samples[drafters[0]["name"]]
        for name, key in (
            ("tau_ratio", "tau/macro"),
            ("later_ratio", "later"),
            ("later_pooled_ratio", "later_pooled"),
        ):
            point = quotient(mine.statistics()[key], first.statistics()[key])[0]
            low, high = interval(quotient(mine.statistics(weights)[key], first.statistics(weights)[key]))
            entry[name] = value(float(point), float(low), float(high))


def measure(
    samples: Mapping[str, Sample], traces: Mapping[str, Sequence[Trace]], resamples: int
) -> list[dict[str, Any]]:
    """The rows of one way of sampling."""
    suites = next(iter(samples.values())).suites
    weights = bootstrap_weights(suites, resamples)
    rows = [row(name, traces[name], samples[name], weights) for name in samples]
    compare(rows, traces, samples, weights)
    return rows


def write(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """Writes the report of ``results``: ``{"runs": {name: rows}, "sweeps": {run: {drafter: rows}}, ...}``.

    Returns the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "results.json", folder / "report.md"]
    write_whole(written[0], json.dumps(results, indent=1) + "\n")
    write_whole(written[1], markdown(results))
    for name, rows in results["runs"].items():
        path = folder / f"acceptance_{name}.png"
        if figures.acceptance(path, name, rows):
            written.append(path)
    for name, sweeps in results["sweeps"].items():
        path = folder / f"thresholds_{name}.png"
        if figures.threshold_sweep(path, sweeps):
            written.append(path)
    return written


def markdown(results: Mapping[str, Any]) -> str:
    """The report as text."""
    parts = [f"# Evaluation of drafters for {results['target']}\n", HEAD.format(**results["settings"])]
    for name, rows in results["runs"].items():
        parts += [f"## {name}\n", lengths_table(rows), positions_table(rows), speed_table(rows)]
    for name, sweeps in results["sweeps"].items():
        for drafter, rows in sweeps.items():
            parts += [f"## Confidence threshold, {name}, {drafter}\n", sweep_table(rows)]
    return "\n".join(parts)


HEAD = """Accepted length: tokens kept a cycle, the target's own token included; the last cycle of a text that reached
the limit is left out. Every drafter saw the same prompts, sampling and seeds; blocks are verified in full unless a
threshold is named. {max_new_tokens} new tokens a prompt, {max_num_seqs} texts at once; tokens/s include the prompts.
Intervals: 95 %, {bootstrap} resamples of the prompts within their sets.
"""


def lengths_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accepted length by prompt set."""
    names = list(rows[0]["tau"])
    return table(["drafter", *names], [[r["name"], *(show(r["tau"][n], 2) for n in names)] for r in rows])


def positions_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Conditional acceptance by position, and the histogram of accepted drafts."""
    drafted = [r for r in rows if r["conditional"]]
    if not drafted:
        return ""
    width = max(len(r["conditional"]) for r in drafted)
    head = [
        "conditional acceptance at",
        *map(str, range(1, width + 1)),
        "mean of 2 and later",
        "pooled",
        "pooled, to the first",
    ]
    body = []
    for r in drafted:
        cells = [show(v, 3) for v in r["conditional"]] + [""] * (width - len(r["conditional"]))
        body.append(
            [r["name"], *cells, show(r["later"], 3), show(r["later_pooled"], 3), show(r.get("later_pooled_ratio"), 2)]
        )
    counts = [[r["name"], *map(str, r["histogram"]), *[""] * (width + 1 - len(r["histogram"]))] for r in drafted]
    return table(head, body) + "\n" + table(["blocks by accepted drafts", *map(str, range(width + 1))], counts)


def speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Throughput and what it is made of."""
    head = [
        "drafter",
        "tokens/s",
        "to plain",
        "texts equal to plain",
        "accepted of offered",
        "offered a cycle",
        "cycles",
    ]
    body = [
        [
            r["name"],
            "" if r["tokens_per_s"] is None else f"{r['tokens_per_s']:.1f}",
            f"{r['speed']:.2f}" if "speed" in r else "",
            f"{r['equal_texts']} of {r['prompts']}" if "equal_texts" in r else "",
            show(r["rate"], 3),
            show(r["offered"], 2),
            str(r["cycles"]),
        ]
        for r in rows
    ]
    return table(head, body)


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sweep of one drafter."""
    head = ["threshold", "accepted length", "accepted of offered", "offered a cycle", "tokens/s"]
    body = [
        [
            f"{r['threshold']:g}",
            show(r["tau"], 2),
            show(r["rate"], 3),
            show(r["offered"], 2),
            f"{r['tokens_per_s']:.1f}",
        ]
        for r in rows
    ]
    return table(head, body)


def show(entry: Mapping[str, float | None] | None, digits: int) -> str:
    """``1.40 [1.35, 1.46]``; empty for no value."""
    if entry is None or entry["value"] is None:
        return ""
    if entry["low"] is None or entry["high"] is None:
        return f"{entry['value']:.{digits}f}"
    return f"{entry['value']:.{digits}f} [{entry['low']:.{digits}f}, {entry['high']:.{digits}f}]"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
