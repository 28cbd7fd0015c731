"""What the cells of load say: the best fixed arm, the adaptive one against it, what it predicted against what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEAST_RATIO = 0.95
PREDICTION_ERROR = 0.10
FIXED = ("none", "fixed")  # first words of the names of arms that admit equally many drafts in every cycle

Cell = dict[str, Any]


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """One arm at one concurrency, its rounds added up."""
    total = {name: sum(cell.get(name, 0.0) for cell in cells) for name in {n for c in cells for n in c} & _SUMMED}

    def ratio(above: str, below: str, digits: int = 3) -> float | None:
        return round(total.get(above, 0.0) / total[below], digits) if total.get(below) else None

    speeds = [cell["tokens"] / cell["seconds"] for cell in cells]
    speed = total["tokens"] / total["seconds"]
    rate = ratio("alone_committed", "alone_ms", 6)
    return {
        "rounds": len(cells),
        "tokens_per_s": round(speed, 2),
        "tokens_per_s_by_round": [round(s, 2) for s in speeds],
        "tokens_per_s_user": round(speed / cells[0]["concurrency"], 2),
        "drafts_per_request": ratio("offered", "request_cycles"),
        "acceptance": ratio("accepted", "offered"),
        "accepted_length": ratio("committed", "request_cycles"),
        "cycle_ms": ratio("alone_ms", "alone_cycles", 2),
        "decode_tokens_per_s": None if rate is None else round(1e3 * rate, 2),
        "finished": int(total["finished"]),
        "load_average": max(max(cell["load_average"]) for cell in cells),
    }


_SUMMED = {
    "tokens", "seconds", "finished", "cycles", "request_cycles", "committed", "offered", "accepted", "alone_cycles",
    "alone_ms", "alone_committed", "predicted_ms", "predicted_tokens", "predicted_plain_tokens",
}  # fmt: skip


def speed_of(cells: Sequence[Cell]) -> float:
    """Tokens per second over several cells."""
    return sum(cell["tokens"] for cell in cells) / sum(cell["seconds"] for cell in cells)


def best_fixed(cells: Sequence[Cell], rounds: Sequence[int]) -> str:
    """The fastest arm that admits equally many drafts in every cycle (none included), by ``rounds``."""
    names = list(dict.fromkeys(c["arm"] for c in cells if c["arm"].split()[0] in FIXED))
    return max(names, key=lambda name: speed_of([c for c in cells if c["arm"] == name and c["round"] in rounds]))


def paired_ratio(ours: Sequence[Cell], theirs: Sequence[Cell], seed: int = 0) -> tuple[float, float, float]:
    """Ratio of tokens per second, and its 95 % bootstrap interval.

    The same round and the same part of a cell (the same prompts, about) make a pair. Rounds are drawn with
    replacement, then parts within them, for both arms together.

    Args:
        ours, theirs: cells of the same rounds, in the same order.
    """
    a = np.array([np.asarray(cell["blocks"]) / cell["seconds"] for cell in ours])  # [rounds, parts]
    b = np.array([np.asarray(cell["blocks"]) / cell["seconds"] for cell in theirs])
    rng = np.random.default_rng(seed)
    rounds, parts = a.shape
    which = rng.integers(rounds, size=(RESAMPLES, rounds, 1))
    part = rng.integers(parts, size=(RESAMPLES, rounds, parts))
    below = np.maximum(b[which, part].sum((1, 2)), 1e-9)  # very short cells have parts without a token
    low, high = np.percentile(a[which, part].sum((1, 2)) / below, [2.5, 97.5])
    return float(a.sum() / b.sum()), float(low), float(high)


def predicted_speedup(adaptive: Sequence[Cell]) -> float | None:
    """Tokens that the scheduler expected of its cycles (survivals of what it admitted, at the table's times), over
    those that plain decoding makes in the same time by the same table."""
    plain = sum(cell.get("predicted_plain_tokens", 0.0) for cell in adaptive)
    return sum(cell["predicted_tokens"] for cell in adaptive) / plain if plain else None


def measured_speedup(adaptive: Sequence[Cell], none: Sequence[Cell]) -> float:
    """Of decoding: both arms' committed tokens over milliseconds, in cycles that no prompt disturbed."""

    def rate(cells: Sequence[Cell]) -> float:
        return sum(c["alone_committed"] for c in cells) / sum(c["alone_ms"] for c in cells)

    return rate(adaptive) / rate(none)


def with_prompts(speedup: float, none: Sequence[Cell]) -> float:
    """What a speed-up of decoding makes of the whole, prompts included: their share of the plain arm's time stays."""
    share = decoding_share(none)
    return 1.0 / ((1.0 - share) + share / speedup)


def decoding_share(none: Sequence[Cell]) -> float:
    """Share of the plain arm's time that its cycles took."""
    cycles_ms = sum(c["cycles"] * c["alone_ms"] / c["alone_cycles"] for c in none)
    return min(cycles_ms / 1e3 / sum(c["seconds"] for c in none), 1.0)


def compare(cells: Sequence[Cell], concurrency: int, choose: Sequence[int], judge: Sequence[int]) -> dict[str, Any]:
    """The adaptive arm at one concurrency. ``judge``: rounds of the comparison, () where there is only one round:
    it then is shown, chosen and compared by the same cells."""
    own = sorted((c for c in cells if c["concurrency"] == concurrency), key=lambda c: c["round"])

    def of(arm: str, rounds: Sequence[int]) -> list[Cell]:
        return [c for c in own if c["arm"] == arm and c["round"] in rounds]

    best = best_fixed(own, choose)
    rounds = judge or choose
    ratio, low, high = paired_ratio(of("adaptive", rounds), of(best, rounds))
    every = sorted({c["round"] for c in own})
    predicted, measured = (
        predicted_speedup(of("adaptive", every)),
        measured_speedup(of("adaptive", every), of("none", every)),
    )
    found: dict[str, Any] = {
        "concurrency": concurrency,
        "best_fixed": best,
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "measured_speedup": round(measured, 4),
        "measured_speedup_with_prompts": round(speed_of(of("adaptive", every)) / speed_of(of("none", every)), 4),
        "decoding_share": round(decoding_share(of("none", every)), 3),
    }
    if predicted is not None:
        found["predicted_speedup"] = round(predicted, 4)
        found["predicted_speedup_with_prompts"] = round(with_prompts(predicted, of("none", every)), 4)
        adaptive = of("adaptive", every)
        found["predicted_over_measured_ms"] = round(
            sum(c["predicted_ms"] for c in adaptive) / sum(c["alone_ms"] for c in adaptive), 4
        )
    if judge:
        found["ratio_ok"] = ratio >= LEAST_RATIO
        found["interval_reaches_1"] = high >= 1.0
        found["prediction_ok"] = predicted is not None and abs(predicted / measured - 1.0) <= PREDICTION_ERROR
    return found


def analyse(cells: Sequence[Cell], concurrency: Sequence[int], shown: Sequence[int]) -> dict[str, Any]:
    """Of complete rounds: summaries by concurrency and arm, and comparisons.

    The best fixed arm is chosen by the first half of the rounds and compared in the second half.
    """
    arms = list(dict.fromkeys(c["arm"] for c in sorted(cells, key=lambda c: c["arm"])))
    rounds = sorted({c["round"] for c in cells})
    half = rounds[: len(rounds) // 2] or rounds
    rest = [r for r in rounds if r not in half]
    table, comparisons = [], []
    for users in sorted({*concurrency, *shown}):
        for arm in arms:
            own = [c for c in cells if (c["concurrency"], c["arm"]) == (users, arm)]
            if own:
                table.append({"concurrency": users, "arm": arm, **summary(own)})
        judged = users in concurrency
        present = sorted({c["round"] for c in cells if c["concurrency"] == users})
        if present and {"none", "adaptive"} <= set(arms):
            comparisons.append(compare(cells, users, half if judged else present, rest if judged else []))
    return {"arms": table, "comparisons": comparisons}
