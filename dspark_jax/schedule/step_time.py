"""Step time by number of verified tokens: the hardware half of the scheduler (paper, sec. 3.2.2, SPS(B)).

Source: Cheng et al., arXiv:2607.05147. The paper's table holds steps per second by batch size B in tokens;
here it holds milliseconds, B = anchors + admitted drafts. Programs exist for a few token counts only
(buckets), so a step of T tokens costs what the smallest listed count >= T costs: the table is a staircase and
is never interpolated.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

_CURVE = ("tokens", "milliseconds", "context_tokens", "slots", "draft_ms", "draft_ms_by_width")
_ORIGIN = ("machine", "device", "dtype", "commit", "model_hash")
FLAT_RATIO = 1.02  # steps that differ by less than this give the scheduler nothing to decide


@dataclass(frozen=True, eq=False)
class StepTimeTable:
    """Milliseconds of one verify step by number of tokens in it.

    A table handed over as an object is taken as given: any shape, not only monotone. An entry may be infinite
    ("never run this many"). Equality and hash are by value, so a table can be a static argument of `jax.jit`.

    Attributes:
        tokens: [B] int64, strictly increasing, the token counts measured (the engine's buckets).
        milliseconds: [B] float64, > 0.
        context_tokens: context length at which it was measured; None = any.
        slots: slot bucket at which it was measured; None = any.
        draft_ms: milliseconds of one draft at these slots, if measured.
        draft_ms_by_width: pairs (drafts a block, milliseconds) of narrower blocks, widths increasing; a width that is
            not among them takes `draft_ms`.
        machine, device, dtype, commit, model_hash: where it comes from, if known. See `differences`.
        rows: further tables by context length and slots, among which `at` chooses; () where this is the only
            one.

    Raises:
        ValueError: an attribute is malformed; the message names it.
    """

    tokens: Any  # any flat sequence goes in; a read-only array comes out
    milliseconds: Any
    context_tokens: int | None = None
    slots: int | None = None
    draft_ms: float | None = None
    machine: str | None = None
    device: str | None = None
    dtype: str | None = None
    commit: str | None = None
    model_hash: str | None = None
    rows: tuple[StepTimeTable, ...] = ()
    draft_ms_by_width: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _check_tokens(self.tokens))
        object.__setattr__(self, "milliseconds", _check_milliseconds(self.milliseconds, self.tokens.size))
        for name in ("context_tokens", "slots"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not _is_index(value) or value < 0):
                raise ValueError(f"{name}: an integer >= 0 or None expected, got {value!r}")
        if self.draft_ms is not None and not (_is_number(self.draft_ms) and 0 <= self.draft_ms < math.inf):
            raise ValueError(f"draft_ms: a finite number of milliseconds >= 0 or None expected, got {self.draft_ms!r}")
        object.__setattr__(self, "draft_ms_by_width", _check_by_width(self.draft_ms_by_width))
        for name in _ORIGIN:
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}: a string or None expected, got {getattr(self, name)!r}")
        object.__setattr__(self, "rows", tuple(self.rows))
        for i, row in enumerate(self.rows):
            if not isinstance(row, StepTimeTable) or row.rows:
                raise ValueError(f"rows[{i}]: a StepTimeTable without rows of its own expected")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepTimeTable) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in values)

    def draft_ms_of(self, width: int | None = None) -> float | None:
        """Milliseconds of a block of `width` drafts (None: the whole block), None if not known."""
        return dict(self.draft_ms_by_width).get(width or 0, self.draft_ms)

    @property
    def last(self) -> int:
        """The largest number of tokens the table knows."""
        return int(self.tokens[-1])

    @property
    def is_flat(self) -> bool:
        """Whether all entries are alike (within 2 %), so that scheduling by this table admits everything."""
        return bool(self.milliseconds.max() <= FLAT_RATIO * self.milliseconds.min())

    def ms(self, tokens: int) -> float:
        """Milliseconds of a step of `tokens` tokens: the entry of the smallest listed count >= tokens.

        Raises:
            ValueError: negative, or beyond the last entry (which the message names).
        """
        return float(self.milliseconds[self._entry(tokens)])

    def bucket(self, tokens: int) -> int:
        """The smallest listed count >= tokens: what such a step really runs. Errors as `ms`."""
        return int(self.tokens[self._entry(tokens)])

    def _entry(self, tokens: int) -> int:
        count = operator.index(tokens)
        if not 0 <= count <= self.last:
            raise ValueError(f"{count} tokens are outside the step-time table, whose last entry is {self.last} tokens")
        return int(self.tokens.searchsorted(count))

    def window(self, first: int, count: int) -> np.ndarray:
        """`ms` of first, first + 1, ... as one array.

        Returns:
            [n] float64 (a copy), n = count, fewer where the table ends before that.

        Raises:
            ValueError: `first` is outside the table.
        """
        begin = self._entry(first)
        last = min(first + count - 1, self.last)
        end = int(self.tokens.searchsorted(last)) + 1
        if end - begin == last - first + 1:  # an entry for every count
            return self.milliseconds[begin:end].copy()
        edges = np.minimum(self.tokens[begin:end], last)
        return np.repeat(self.milliseconds[begin:end], np.diff(edges, prepend=first - 1))

    def dense(self, max_tokens: int) -> np.ndarray:
        """[max_tokens + 1] float64: `ms(T)` at index T, infinite beyond the last entry (for device code)."""
        known = self.window(0, max_tokens + 1)
        return np.pad(known, (0, max_tokens + 1 - known.size), constant_values=np.inf)

    def at(self, context_tokens: int, slots: int) -> StepTimeTable:
        """The row for a batch in `slots` slots with contexts up to `context_tokens`.

        Slots decide first, then context: the smallest listed value that holds what is asked (programs are
        compiled by such buckets), else a row that names none, else the largest listed. The table itself if it
        has no rows.
        """

        def distance(listed: int | None, wanted: int) -> tuple[int, int]:
            if listed is None:
                return 1, 0
            return (0, listed - wanted) if listed >= wanted else (2, wanted - listed)

        return min(
            self.rows or (self,),
            key=lambda row: (distance(row.slots, slots), distance(row.context_tokens, context_tokens)),
        )

    @classmethod
    def combine(cls, rows: Iterable[StepTimeTable]) -> StepTimeTable:
        """One table out of several measured on one machine at different slots and context lengths.

        Its own curve is the one of the most slots and longest context, for those who do not ask `at`.

        Raises:
            ValueError: no rows, two rows at one place, or rows from different machines, models or commits.
        """
        flat = tuple(rows)
        if not flat:
            raise ValueError("rows: at least one table expected")
        for name in _ORIGIN:
            found = {getattr(row, name) for row in flat}
            if len(found) > 1:
                raise ValueError(f"rows: {name} differs: {sorted(map(str, found))}")
        places = [(row.slots, row.context_tokens) for row in flat]
        if len(set(places)) < len(places):
            raise ValueError(f"rows: two tables for the same (slots, context_tokens) in {places}")
        widest = max(flat, key=lambda row: (row.slots or 0, row.context_tokens or 0))
        return replace(widest, rows=flat)

    def differences(self, **here: str | None) -> tuple[str, ...]:
        """What of `machine`, `device`, `dtype`, `commit`, `model_hash` is not what is passed.

        Meant for tables loaded from a file. What either side leaves out (None) is not compared.

        Returns:
            One readable line for each difference.

        Raises:
            ValueError: a name that is none of the five.
        """
        unknown = set(here) - set(_ORIGIN)
        if unknown:
            raise ValueError(f"{sorted(unknown)}: names among {list(_ORIGIN)} expected")
        pairs = ((name, getattr(self, name), value) for name, value in here.items())
        return tuple(
            f"{name}: the table has {listed!r}, here it is {value!r}"
            for name, listed, value in pairs
            if listed is not None and value is not None and listed != value
        )

    def save(self, path: str | Path) -> None:
        """Write JSON that `load` reads, a row a line.

        Raises:
            ValueError: an entry is infinite (JSON has no such number).
        """
        try:
            entries = [
                f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
                for name, value in _to_json(self, _CURVE + _ORIGIN).items()
            ]
            lines = [json.dumps(_to_json(row, _CURVE), allow_nan=False) for row in self.rows]
        except ValueError as error:
            raise ValueError(f"{path}: milliseconds: infinite entries cannot be saved") from error
        if lines:
            entries.append('"rows": [\n  ' + ",\n  ".join(lines) + "\n ]")
        Path(path).write_text("{\n " + ",\n ".join(entries) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> StepTimeTable:
        """Read a table written by `save`.

        Raises:
            ValueError: not such a table; the message names the file and the field.
            OSError: the file cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
            table = _from_json(content, (*_CURVE, *_ORIGIN, "rows"), {})
            origin = {name: getattr(table, name) for name in _ORIGIN}
            rows = content.get("rows", [])
            if not isinstance(rows, list):
                raise ValueError(f"rows: a list expected, got {rows!r}")
            return replace(table, rows=tuple(_row_from_json(i, row, origin) for i, row in enumerate(rows)))
        except ValueError as error:  # json.JSONDecodeError is one too
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def profile(
        cls,
        measure: Callable[[int], object],
        tokens: Sequence[int],
        *,
        measure_draft: Callable[[], object] | None = None,
        repeats: int = 5,
        warmup: int = 1,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **about: Any,
    ) -> StepTimeTable:
        """Measure a table.

        Every round times each token count once, so that a drift of the machine reaches all of them alike. The
        median over the rounds is made monotone by isotonic regression: a dip in the medians is noise, and
        unlike a running maximum the least-squares fit does not let one slow entry lift all that follow.

        Args:
            measure: runs one verify step of that many tokens and returns when it has finished.
            tokens: token counts, strictly increasing.
            measure_draft: runs one draft and returns when it has finished; gives `draft_ms`.
            repeats: rounds wanted.
            warmup: untimed calls of each before the first round (compilation).
            budget_s: once this many seconds have passed, warm-up included, no further round is begun; one
                round is always made.
            clock: seconds.
            **about: other attributes of the table (slots, context_tokens, machine, ...).

        Raises:
            ValueError: malformed tokens, or repeats < 1 or warmup < 0.
        """
        counts = [int(t) for t in _check_tokens(tokens)]
        if repeats < 1 or warmup < 0:
            raise ValueError(f"repeats >= 1 and warmup >= 0 expected, got {repeats} and {warmup}")
        steps: list[Callable[[], object]] = [partial(measure, count) for count in counts]
        if measure_draft is not None:
            steps.append(measure_draft)
        begin = clock()
        for step in steps:
            for _ in range(warmup):
                step()
        rounds: list[list[float]] = []
        while not rounds or (len(rounds) < repeats and (budget_s is None or clock() - begin < budget_s)):
            rounds.append([_seconds(step, clock) for step in steps])
        medians_ms = 1e3 * np.median(np.asarray(rounds), axis=0)
        if measure_draft is not None:
            about = {**about, "draft_ms": float(medians_ms[-1])}
        return cls(tokens=counts, milliseconds=isotonic(medians_ms[: len(counts)]), **about)


def isotonic(values: np.ndarray) -> np.ndarray:
    """Least-squares non-decreasing fit of [B] values (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (mean, entries)
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            left, entries = blocks.pop()
            mean, size = (left * entries + mean * size) / (entries + size), entries + size
        blocks.append((mean, size))
    return np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])


def _seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    step()
    return clock() - begin


def _is_index(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _numbers(values: Any, name: str, kinds: str) -> np.ndarray:
    """[B] array of one of the NumPy kinds; np.asarray alone would turn the string "3" into a number."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged
        raise ValueError(f"{name}: a flat list of numbers expected") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in kinds:
        what = "integers" if "f" not in kinds else "numbers"
        raise ValueError(f"{name}: a flat list of one or more {what} expected, got {values!r:.80}")
    return array


def _check_tokens(values: Any) -> np.ndarray:
    tokens = _numbers(values, "tokens", "iu").astype(np.int64)
    if tokens[0] < 0 or (tokens[1:] <= tokens[:-1]).any():
        raise ValueError(f"tokens: counts >= 0, strictly increasing, expected, got {tokens.tolist()!r:.80}")
    tokens.setflags(write=False)
    return tokens


def _check_milliseconds(values: Any, size: int) -> np.ndarray:
    milliseconds = _numbers(values, "milliseconds", "iuf").astype(np.float64)
    if milliseconds.size != size:
        raise ValueError(f"milliseconds: {size} entries expected, one for each of tokens, got {milliseconds.size}")
    if not (milliseconds > 0).all():  # NaN fails too
        raise ValueError(f"milliseconds: entries > 0 expected, got {milliseconds.tolist()!r:.80}")
    milliseconds.setflags(write=False)
    return milliseconds


def _check_by_width(values: Any) -> tuple[tuple[int, float], ...]:
    wanted = f"draft_ms_by_width: pairs of a width >= 1 and finite milliseconds >= 0 expected, got {values!r:.80}"
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(wanted)
    pairs = []
    for pair in values:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(wanted)
        width, ms = pair
        if isinstance(width, bool) or not _is_index(width) or width < 1:
            raise ValueError(wanted)
        if not (_is_number(ms) and 0 <= ms < math.inf):
            raise ValueError(wanted)
        pairs.append((int(width), float(ms)))
    widths = [width for width, _ in pairs]
    if widths != sorted(set(widths)):
        raise ValueError(f"draft_ms_by_width: widths must increase, got {widths}")
    return tuple(pairs)


def _to_json(table: StepTimeTable, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(table, name) for name in names}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
        if value is not None and not (isinstance(value, tuple) and not value)
    }


def _from_json(content: Any, names: Sequence[str], origin: dict[str, Any]) -> StepTimeTable:
    if not isinstance(content, dict):
        raise ValueError(f"an object with tokens and milliseconds expected, got {content!r:.80}")
    for name in ("tokens", "milliseconds"):
        if name not in content:
            raise ValueError(f"{name}: missing")
    if unknown := sorted(set(content) - set(names)):
        raise ValueError(f"{unknown[0]}: not a field here; known are {', '.join(names)}")
    if not np.isfinite(_numbers(content["milliseconds"], "milliseconds", "iuf")).all():
        raise ValueError("milliseconds: finite entries expected in a file")
    own = {name: value for name, value in content.items() if name != "rows"}
    return StepTimeTable(**origin, **own)


def _row_from_json(index: int, content: Any, origin: dict[str, Any]) -> StepTimeTable:
    try:
        return _from_json(content, _CURVE, origin)
    except ValueError as error:
        raise ValueError(f"rows[{index}]: {error}") from error
