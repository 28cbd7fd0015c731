"""Which verify sizes to compile, from measured step times and within the budget of programs.

A size is worth what it adds to the tokens per millisecond of the best schedule (the paper's theta). That depends on how
well drafts survive, which differs from text to text, so several acceptances are looked at and the logarithms averaged.
Sizes are added one by one, the best first, counted by the programs that each needs (one for every context). So a slot
bucket in which drafts never pay gets none, and none goes to where a larger size costs as good as nothing more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

from dspark_jax.engine.buckets import Buckets
from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.choice import choose

ACCEPTANCES = (0.45, 0.6, 0.75, 0.9)
"""Conditional acceptance of every draft: the paper's Figure 2 spans them, from chat to code."""

WORTH = 1e-3
"""Gain in mean log theta below which a size is not worth compiling."""

CANDIDATES = 24
"""Sizes tried for a slot bucket at most."""

StepMs = Callable[[int, int], float]
"""Milliseconds of a step by (slots, tokens); tokens = slots: the step without drafts."""


def refine(
    buckets: Buckets,
    step_ms: StepMs,
    draft_ms: Callable[[int], float],
    budget: int,
    window: int,
    most_tokens: int | None = None,
) -> Buckets:
    """``buckets`` with further verify sizes.

    Args:
        step_ms, draft_ms: of the slot buckets, measured or told by a model.
        budget: programs allowed in all.
        window: tokens of a request; see ``Buckets.keys``.
        most_tokens: of a step; a larger size would never be filled.
    """
    while True:
        left = budget - len(buckets.keys(window - 1))
        gains = {}
        for i, slots in enumerate(buckets.slots):
            if len(buckets.contexts_of(slots)) > left:
                continue
            fewest = buckets.slots[i - 1] + 1 if i else 1
            before = _value(buckets.tokens[slots], fewest, slots, buckets.drafts, step_ms, draft_ms)
            for size in _candidates(slots, buckets, most_tokens):
                sizes = (*buckets.tokens[slots], size)
                after = _value(sizes, fewest, slots, buckets.drafts, step_ms, draft_ms)
                gains[slots, size] = (after - before) / len(buckets.contexts_of(slots))
        if not gains:
            return buckets
        slots, size = max(gains, key=lambda place: gains[place])
        if gains[slots, size] < WORTH:
            return buckets
        buckets = _with(buckets, slots, (*buckets.tokens[slots], size))


def sizes_of(table: StepTimeTable, buckets: Buckets) -> Buckets:
    """``buckets`` with the verify sizes that a measured table has rows for: those of an earlier start."""
    for row in table.rows:
        if row.slots is not None and row.slots in buckets.tokens:
            buckets = _with(buckets, row.slots, [t for t in row.tokens.tolist() if t > row.slots])
    return buckets


def _with(buckets: Buckets, slots: int, sizes: Iterable[int]) -> Buckets:
    return dataclasses.replace(buckets, tokens={**buckets.tokens, slots: tuple(sorted({*sizes}))})


def _candidates(slots: int, buckets: Buckets, most_tokens: int | None) -> list[int]:
    """Evenly spread on a logarithmic scale, between one draft and whole blocks."""
    whole = slots * buckets.width
    spread = np.geomspace(slots + 1, min(whole, max(most_tokens or whole, slots + 1)), CANDIDATES)
    return sorted({round(float(size)) for size in spread} - set(buckets.tokens[slots]))


def _value(
    sizes: tuple[int, ...], fewest: int, slots: int, drafts: int, step_ms: StepMs, draft_ms: Callable[[int], float]
) -> float:
    """Mean log theta of the best schedule, over acceptances, with the fewest and the most requests of the bucket."""
    found = []
    for requests in {fewest, slots}:
        tokens = [requests, *sorted({size for size in sizes if size > requests})]
        milliseconds = [step_ms(slots, slots), *(step_ms(slots, size) for size in tokens[1:])]
        table = StepTimeTable(tokens=tokens, milliseconds=milliseconds)
        for acceptance in ACCEPTANCES:
            rows = np.tile(acceptance ** np.arange(1, drafts + 1), (requests, 1))
            choice = choose(rows, table, draft_ms(slots))
            gained = np.sort(rows, axis=None)[::-1][: choice.drafts].sum()
            found.append(math.log((requests + gained) / choice.step_ms))
    return float(np.mean(found))
