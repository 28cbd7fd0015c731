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
        "late_compiles": int(total.get("late_compiles", 0)),
        "load_average": max(max(cell["load_average"]) for cell in cells),
    }


_SUMMED = {
    "tokens", "seconds", "finished", "cycles", "request_cycles", "committed", "offered", "accepted", "alone_cycles",
    "alone_ms", "alone_committed", "predicted_ms", "predicted_tokens", "predicted_plain_tokens",
    "late_compiles",
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
    return float(a.sum() / max(b.sum(), 1e-9)), float(low), float(high)


def predicted_speedup(adaptive: Sequence[Cell]) -> float | None:
    """Tokens expected of the adaptive arm's cycles at the times of the table that decided them, over those that plain
    decoding makes in the same time by the same table. Tokens are expected by the calibrated survivals of the admitted
    drafts of the cycle's own block, not by the older scores that the number of drafts was chosen by (``Meter``). None
    where nothing was predicted."""
    return _over(_sum(adaptive, "predicted_tokens"), _sum(adaptive, "predicted_plain_tokens"))


def measured_speedup(adaptive: Sequence[Cell], none: Sequence[Cell]) -> float | None:
    """Of decoding: both arms' committed tokens over milliseconds, in cycles that no prompt disturbed; what the drafter
    catches up with in them is counted. None where an arm has no such cycle."""

    def rate(cells: Sequence[Cell]) -> float | None:
        return _over(_sum(cells, "alone_committed"), _sum(cells, "alone_ms"))

    return _over(rate(adaptive), rate(none))


def with_prompts(speedup: float | None, none: Sequence[Cell]) -> float | None:
    """What a speed-up of decoding makes of the whole, prompts included: their share of the plain arm's time stays."""
    share = decoding_share(none)
    return None if share is None or not speedup else 1.0 / ((1.0 - share) + share / speedup)


def decoding_share(none: Sequence[Cell]) -> float | None:
    """Share of the plain arm's time that its cycles took; None where none of them was undisturbed."""
    cycle_ms = _over(_sum(none, "alone_ms"), _sum(none, "alone_cycles"))
    return None if cycle_ms is None else min(_sum(none, "cycles") * cycle_ms / 1e3 / _sum(none, "seconds"), 1.0)


def _sum(cells: Sequence[Cell], name: str) -> float:
    """Very short cells lack what they have no cycle for."""
    return float(sum(cell.get(name, 0.0) for cell in cells))


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _near(predicted: float | None, measured: float | None) -> bool:
    """Within the bar; not where one is unknown."""
    error = _over(predicted, measured)
    return error is not None and abs(error - 1.0) <= PREDICTION_ERROR


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
    adaptive, none = of("adaptive", every), of("none", every)
    predicted, measured = predicted_speedup(adaptive), measured_speedup(adaptive, none)
    whole, measured_whole = with_prompts(predicted, none), _over(speed_of(adaptive), speed_of(none))
    found: dict[str, Any] = {
        "concurrency": concurrency,
        "best_fixed": best,
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "predicted_speedup": _rounded(predicted),
        "measured_speedup": _rounded(measured),
        "predicted_speedup_with_prompts": _rounded(whole),
        "measured_speedup_with_prompts": _rounded(measured_whole),
        "decoding_share": _rounded(decoding_share(none), 3),
        "predicted_over_measured_ms": _rounded(_over(_sum(adaptive, "predicted_ms"), _sum(adaptive, "alone_ms"))),
        "absorbing_share": _rounded(_over(_sum(adaptive, "absorbing_cycles"), _sum(adaptive, "alone_cycles"))),
    }
    if judge:
        found["ratio_ok"] = ratio >= LEAST_RATIO
        found["interval_reaches_1"] = high >= 1.0
        found["prediction_ok"] = _near(predicted, measured)
        found["prediction_with_prompts_ok"] = _near(whole, measured_whole)
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
