"""A load benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = {
    "arm": "arm",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_user": "tokens/s/user",
    "drafts_per_request": "drafts a request",
    "acceptance": "accepted",
    "accepted_length": "accepted length",
    "cycle_ms": "cycle ms",
    "decode_tokens_per_s": "decoding tokens/s",
    "tokens_per_s_by_round": "tokens/s by round",
}


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Markdown lines. ``columns``: heading by field."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_shown(row.get(name)) for name in columns) + " |")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_shown(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _verdict(comparison: Mapping[str, Any]) -> str:
    if "ratio_ok" not in comparison:
        return "shown, no bar"
    names = {
        "ratio_ok": "ratio",
        "interval_reaches_1": "interval",
        "prediction_ok": "prediction",
        "prediction_with_prompts_ok": "prediction with prompts",
    }
    missed = [text for name, text in names.items() if not comparison[name]]
    return "all met" if not missed else "missed: " + ", ".join(missed)


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report."""
    settings, spread = result["settings"], result.get("step_times_spread")
    late = sum(row["late_compiles"] for row in result["arms"])
    lines = [
        "# Serving under load",
        "",
        f"{settings['target']} with {settings['drafter']}, closed loop, {settings['seconds']:g} s a cell, "
        f"{settings['rounds']} rounds, temperature {settings['temperature']:g}, "
        f"{settings['max_new_tokens']} new tokens; "
        f"{result['processor']}, {result['cores']} cores, jax {result['jax']}, commit {result['commit']}, "
        f"load average at most {max(row['load_average'] for row in result['arms'])}.",
        "",
        f"`{result['command']}`",
        "",
        "The best fixed arm (none is one) is chosen by the first half of the rounds and compared in the second half. "
        "Predicted: the tokens that calibrated confidences of the admitted drafts promise (those of the cycle's own "
        "block; how many are admitted is chosen by older ones) in the scheduler's step times, against plain decoding "
        "by the same times. Measured: all decoding cycles that no prompt disturbed, the drafter's catching up after "
        "cycles without drafts included. With prompts: all of the time; predicted with the prompts' share "
        "of the plain arm's.",
        "",
        f"Programs compiled within cells: {late}"
        + (" (their time is in the cells: nothing here is to be trusted)." if late else "."),
        "",
    ]
    if spread is not None:
        lines += [
            "Step times, measured at the begin of each round: the slowest round of a program is above its fastest one "
            f"by {spread[0]:.1%} (median), {spread[1]:.1%} (most).",
            "",
        ]
    bars = [
        {
            "concurrency": c["concurrency"],
            "best": c["best_fixed"],
            "ratio": f"{c['ratio']:.3f} [{c['interval'][0]:.3f}, {c['interval'][1]:.3f}]",
            "predicted": c["predicted_speedup"],
            "measured": c["measured_speedup"],
            "predicted_whole": c["predicted_speedup_with_prompts"],
            "whole": c["measured_speedup_with_prompts"],
            "verdict": _verdict(c),
        }
        for c in result["comparisons"]
    ]
    lines += table(
        bars,
        {
            "concurrency": "concurrent",
            "best": "best fixed arm",
            "ratio": "adaptive / best, 95 % interval",
            "predicted": "predicted speed-up over none",
            "measured": "measured",
            "predicted_whole": "predicted, with prompts",
            "whole": "measured, with prompts",
            "verdict": "bars (0.95; reaches 1; 10 %, both)",
        },
    )
    for users in dict.fromkeys(row["concurrency"] for row in result["arms"]):
        lines += ["", f"## {users} concurrent", ""]
        lines += table([row for row in result["arms"] if row["concurrency"] == users], COLUMNS)
    return "\n".join(lines) + "\n"
