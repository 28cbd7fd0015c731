"""Measures the step times of an engine's own programs (paper, sec. 3.2.2: the table is profiled at start-up).

Corners of tokens x context x slots come first, then as many of the other programs as fit into half of the time, then
further rounds over all of them, interleaved, so that a drift of the machine reaches all alike, and in the order of
``in_turn``, so that each finds caches and memory as it does in a cycle. What was not measured is filled in by an
additive model; how well that model tells what was measured without it is reported.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dspark_jax.engine.buckets import Buckets, Key
from dspark_jax.engine.refine import StepMs
from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.additive import AdditiveModel, Step, fit
from dspark_jax.schedule.step_time import isotonic

logger = logging.getLogger(__name__)

KINDS = ("plain", "verify", "draft")
NOISY = 0.15
"""Rounds of one program that differ by more than this (median deviation / median) are noise worth a warning."""

Run = Callable[[Key], float]
"""Runs one program in full use and returns the seconds it took."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        table: rows by slot bucket and context, monotone in tokens; ``draft_ms`` is the draft's.
        seconds: it took. measured, programs: how many of the programs were measured.
        held_out: programs that the model was checked against, each left out of the fit in its turn.
        worst_error: of the model there, relative.
        noise: median deviation / median of the noisiest program.
        step_ms, draft_ms: what the model and the measurements say at the shortest context, for ``refine``.
    """

    table: StepTimeTable
    seconds: float
    measured: int
    programs: int
    held_out: int
    worst_error: float
    noise: float
    step_ms: StepMs
    draft_ms: Callable[[int], float]

    def lines(self) -> list[str]:
        """For a start-up log; lines that begin with WARNING deserve attention."""
        found = [
            f"step times: {self.measured} of {self.programs} programs measured in {self.seconds:.1f} s; the additive "
            f"model tells {self.held_out} held-out ones with an error of at most {100 * self.worst_error:.0f} %"
        ]
        if self.noise > NOISY:
            found.append(f"WARNING step times are noisy: rounds of one program differ by {100 * self.noise:.0f} %")
        if all(row.is_flat for row in self.table.rows):
            found.append("WARNING step times are flat: every draft looks free, so all of them are verified")
        return found


def profile(
    run: Run,
    buckets: Buckets,
    longest_prompt: int,
    about: Mapping[str, Any],
    *,
    budget_s: float = 15.0,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measures and fits.

    Args:
        run: a first call of each program is not counted.
        about: origin of the table (``origin.origin``).
        budget_s: no program is begun after it, but that corners are measured once in any case.
        repeats: rounds wanted.
    """
    begin = clock()
    keys = [key for key in buckets.keys(longest_prompt) if key.kind in KINDS]
    first = corners(keys)
    times: dict[Key, list[float]] = {}
    for key in [*first, *(key for key in keys if key not in first)]:
        if key not in first and clock() - begin > budget_s / 2:
            break
        run(key)
        times[key] = [run(key)]
    order = in_turn(times)
    for _ in range(repeats - 1):
        for key, counts in order:
            if clock() - begin > budget_s:
                break
            seconds = run(key)
            if counts:
                times[key].append(seconds)
    medians = {key: 1e3 * float(np.median(rounds)) for key, rounds in times.items()}
    noise = max(float(np.median(np.abs(np.array(r) / np.median(r) - 1.0))) for r in times.values())
    error, held_out = _worst_error(medians, buckets)
    model = _model(medians, buckets)

    def ms_of(key: Key) -> float:
        return medians.get(key) or model.ms(key.kind, _tokens(key, buckets), key.slots, key.context)

    return Profile(
        table=_table(buckets, keys, ms_of, about),
        seconds=clock() - begin,
        measured=len(times),
        programs=len(keys),
        held_out=held_out,
        worst_error=error,
        noise=noise,
        step_ms=partial(_step_ms, medians, buckets, model),
        draft_ms=lambda slots: ms_of(Key("draft", slots, 0, buckets.draft_context(buckets.contexts_of(slots)[0]))),
    )


def _step_ms(medians: Mapping[Key, float], buckets: Buckets, model: AdditiveModel, slots: int, tokens: int) -> float:
    """Of a size that may not be compiled. Beyond the largest measured one steps are taken to grow with their tokens:
    the model is constant there, and nothing must look free because nobody measured it."""
    kind, context = "plain" if tokens == slots else "verify", buckets.contexts_of(slots)[0]
    known = medians.get(Key(kind, slots, tokens, context))
    last = int(model.tokens[kind][0][-1])
    return known or model.ms(kind, tokens, slots, context) * max(tokens / last, 1.0)


def corners(keys: Sequence[Key]) -> list[Key]:
    """Of each kind: fewest and most slots, shortest and longest context, fewest and most tokens there."""
    found: dict[Key, None] = {}
    for kind in KINDS:
        own = [key for key in keys if key.kind == kind]
        for slots in _ends(key.slots for key in own):
            rows = [key for key in own if key.slots == slots]
            for context in _ends(key.context for key in rows):
                row = [key for key in rows if key.context == context]
                for tokens in _ends(_width(key) for key in row):
                    found |= {key: None for key in row if _width(key) == tokens}
    return list(found)


def in_turn(keys: Collection[Key]) -> list[tuple[Key, bool]]:
    """The programs of one round, and whether the run counts: those of the same slots behind each other, the drafts
    last, as one follows a step in a real cycle. The first of them runs once more before, uncounted: behind a program of
    another size steps take up to a tenth longer, and a small draft up to a half."""
    order = sorted(keys, key=lambda key: (key.slots, key.kind == "draft", key.context))
    found: list[tuple[Key, bool]] = []
    for before, key in zip([None, *order], order, strict=False):
        if before is None or before.slots != key.slots:
            found.append((key, False))
        found.append((key, True))
    return found


def _ends(values: Any) -> list[Any]:
    known = sorted(set(values))
    return [known[0], known[-1]][: len(known)]


def _width(key: Key) -> float:
    """Of programs of a kind and the same slots the one with most tokens has the largest; whole blocks are a draft's."""
    return math.inf if key.kind == "draft" and not key.tokens else key.tokens


def _tokens(key: Key, buckets: Buckets) -> int:
    """Of the program's matmuls."""
    return key.slots * (key.tokens or buckets.drafts) if key.kind == "draft" else key.tokens


def _model(medians: Mapping[Key, float], buckets: Buckets) -> AdditiveModel:
    return fit([Step(key.kind, _tokens(key, buckets), key.slots, key.context, ms) for key, ms in medians.items()])


def _worst_error(medians: Mapping[Key, float], buckets: Buckets) -> tuple[float, int]:
    """Relative error of the model at programs that its fit left out, one at a time, and how many they were: those
    whose number of tokens was also measured with other slots or another context."""
    worst, held_out = 0.0, 0
    for key, ms in medians.items():
        tokens = _tokens(key, buckets)
        rest = {k: m for k, m in medians.items() if k != key}
        if any((k.kind, _tokens(k, buckets)) == (key.kind, tokens) for k in rest):
            held_out += 1
            step = Step(key.kind, tokens, key.slots, key.context, ms)
            worst = max(worst, _model(rest, buckets).error(step))
    return worst, held_out


def _table(
    buckets: Buckets, keys: Sequence[Key], ms: Callable[[Key], float], about: Mapping[str, Any]
) -> StepTimeTable:
    """A row for each slot bucket and context: the plain step first where there is one, then the verify sizes."""
    rows = []
    for slots in buckets.slots:
        for context in buckets.contexts_of(slots):
            row = [k for k in keys if (k.slots, k.context) == (slots, context) and k.kind != "draft"]
            by_tokens = {key.tokens: ms(key) for key in sorted(row, key=lambda k: (k.tokens, k.kind == "plain"))}
            draft_context = buckets.draft_context(context)
            draft = Key("draft", slots, 0, draft_context)
            narrow = [(w, ms(Key("draft", slots, w, draft_context))) for w in buckets.narrow.get(slots, ())]
            rows.append(
                StepTimeTable(
                    tokens=list(by_tokens),
                    milliseconds=isotonic(np.array(list(by_tokens.values()))),
                    context_tokens=context,
                    slots=slots,
                    draft_ms=ms(draft) if buckets.drafts else None,
                    draft_ms_by_width=tuple(narrow),
                    **about,
                )
            )
    return StepTimeTable.combine(rows)
