"""One report of many drafters: ``results.json``, ``report.md`` and PNG figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.evaluate import figures
from dspark_jax.evaluate.acceptance import LEAST_TRIES, Sample, bootstrap_weights, interval, ratios, value
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
        "tried": sample.tried.sum(0).astype(int).tolist(),
        "later_pooled": scalar("later_pooled"),
        "later_mean": {**scalar("later_mean"), "positions": sample.reached()},
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

    ``speed`` (tokens/s over the plain row's), ``equal_texts``; and what ``acceptance.ratios`` finds to the first
    drafter.
    """
    plain = next((r for r in rows if r["name"] == PLAIN), None)
    drafters = [r for r in rows if r["name"] != PLAIN]
    for entry in rows:
        if plain is not None and plain["tokens_per_s"] and entry["tokens_per_s"]:
            entry["speed"] = round(entry["tokens_per_s"] / plain["tokens_per_s"], 3)
            pairs = zip(traces[entry["name"]], traces[PLAIN], strict=True)
            entry["equal_texts"] = sum(a.tokens == b.tokens for a, b in pairs)
    for entry in drafters[1:]:
        entry |= ratios(samples[entry["name"]], samples[drafters[0]["name"]], weights)


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
    parts = [
        f"# Evaluation of drafters for {results['target']}\n",
        HEAD.format(**results["settings"], least_tries=LEAST_TRIES),
    ]
    for name, rows in results["runs"].items():
        parts += [f"## {name}\n", lengths_table(rows), positions_table(rows), speed_table(rows)]
    for name, sweeps in results["sweeps"].items():
        for drafter, rows in sweeps.items():
            parts += [f"## Confidence threshold, {name}, {drafter}\n", sweep_table(rows)]
    return "\n".join(parts)


HEAD = """Accepted length: tokens kept a cycle, the target's own token included; the last cycle of a text that reached
the limit is left out. Every drafter saw the same prompts, sampling and seeds; blocks are verified in full unless a
threshold is named. {max_new_tokens} new tokens a prompt, {max_num_seqs} texts at once; tokens/s include the prompts.
Intervals: 95 %, {bootstrap} resamples of the prompts within their sets. Behind position 1, pooled: of all drafts whose
predecessors in the block were accepted, the share that was accepted; its ratio is over the positions that both drafters
have. The mean of positions gives each the same weight, and takes those with at least {least_tries} tries (for a ratio:
of both).
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
    at = [*map(str, range(1, width + 1))]
    body, tries, counts = [], [], []
    for r in drafted:
        empty = [""] * (width - len(r["conditional"]))
        last = [show(r["later_pooled"], 3), show(r.get("later_pooled_ratio"), 2, positions=True)]
        last += [show(r["later_mean"], 3, positions=True), show(r.get("later_mean_ratio"), 2, positions=True)]
        body.append([r["name"], *(show(v, 3) for v in r["conditional"]), *empty, *last])
        tries.append([r["name"], *map(str, r["tried"]), *empty])
        counts.append([r["name"], *map(str, r["histogram"]), *empty])
    head = [
        "conditional acceptance at",
        *at,
        "2 and later, pooled",
        "to the first",
        "mean of positions",
        "to the first",
    ]
    parts = [table(head, body), table(["tries of position", *at], tries)]
    return "\n".join([*parts, table(["blocks by accepted drafts", "0", *at], counts)])


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


def show(entry: Mapping[str, Any] | None, digits: int, *, positions: bool = False) -> str:
    """``1.40 [1.35, 1.46]``, with ``positions`` those it is of, ``1.40 [1.35, 1.46] (2-7)``; empty for no value."""
    if entry is None or entry["value"] is None:
        return ""
    text = f"{entry['value']:.{digits}f}"
    if entry["low"] is not None and entry["high"] is not None:
        text += f" [{entry['low']:.{digits}f}, {entry['high']:.{digits}f}]"
    return f"{text} ({spans(entry['positions'])})" if positions and entry.get("positions") else text


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, those in a row as ``2-7``."""
    parts: list[list[int]] = []
    for k in numbers:
        if parts and parts[-1][-1] == k - 1:
            parts[-1].append(k)
        else:
            parts.append([k])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
