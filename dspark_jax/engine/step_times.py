"""The step times an engine decides by: given, read from a file, kept from an earlier start, or measured now."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dspark_jax.engine.buckets import Buckets
from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.additive import AdditiveModel, Step, fit
from dspark_jax.whole_file import replacing

logger = logging.getLogger(__name__)


class StepTimes:
    """Answers what a cycle costs.

    Args:
        table: rows by slot bucket and context.
        measured: its rows were measured by an engine (``profile.py``): the first entry of a row is the step
            without drafts, whose program holds the whole slot bucket. A table that a caller made is taken as
            given.
    """

    def __init__(self, table: StepTimeTable, measured: bool) -> None:
        self.table, self.measured = table, measured
        self._curves: dict[tuple[int, ...], StepTimeTable] = {}
        self._drafts: dict[tuple[int, int, int | None], float] = {}
        self._pieces: dict[tuple[int, int], float] = {}

    def curve(self, requests: int, slots: int, context: int, last: int) -> StepTimeTable:
        """Step times of a cycle for ``requests`` in a slot bucket, with ``context`` cache cells, up to ``last``
        tokens: those of its largest program. Steps that are never to be run (infinite ones at the end) are no part of
        it, so that not even a probe takes one."""
        key = (requests, slots, context, last)
        if key not in self._curves:
            row = self.table.at(context, slots)
            tokens, ms = row.tokens.tolist(), row.milliseconds.tolist()
            if self.measured:
                # With one draft more than none the verify program runs, even where its tokens would fit the plain one.
                tokens[0] = min(requests, tokens[0])
            if last < tokens[-1]:
                kept = sum(t < last for t in tokens)
                tokens, ms = [*tokens[:kept], last], [*ms[:kept], row.ms(last)]
            while len(ms) > 1 and math.isinf(ms[-1]) and tokens[-2] >= requests:  # never run this many
                tokens, ms = tokens[:-1], ms[:-1]
            self._curves[key] = dataclasses.replace(row, tokens=tokens, milliseconds=ms)
        return self._curves[key]

    def draft_ms(self, slots: int, context: int, width: int | None = None) -> float:
        """Milliseconds of drafting blocks of ``width`` (None: whole ones) for a slot bucket; 0 where the table does not
        say."""
        place = slots, context, width
        if place not in self._drafts:  # asked for in every cycle
            self._drafts[place] = self.table.at(context, slots).draft_ms_of(width) or 0.0
        return self._drafts[place]

    def known(self, narrow: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Those of the widths by slot bucket whose draft was measured in it."""
        found = {}
        for slots, widths in narrow.items():
            rows = [dict(row.draft_ms_by_width) for row in self.table.rows if row.slots == slots]
            if kept := tuple(width for width in widths if rows and all(width in row for row in rows)):
                found[slots] = kept
        return found

    def piece_ms(self, tokens: int, context: int) -> float:
        """Milliseconds of a piece of prompt, which is not in the table: by the additive model of the table's steps, for
        one slot. Beyond their largest number of tokens it is taken to grow in proportion; 0 where all are infinite.

        A piece unembeds one token, a step all of them, so that this is a little too much where that is dear.
        """
        place = tokens, context
        if place not in self._pieces:
            known, ms = self._additive, 0.0
            if known is not None:
                last = int(known.tokens["step"][0][-1])
                ms = known.ms("step", tokens, 1, context) * max(tokens / last, 1.0)
            self._pieces[place] = ms
        return self._pieces[place]

    @cached_property
    def _additive(self) -> AdditiveModel | None:
        steps = [
            Step("step", tokens, row.slots or 1, row.context_tokens or 0, ms)
            for row in self.table.rows or (self.table,)
            for tokens, ms in zip(row.tokens.tolist(), row.milliseconds.tolist(), strict=True)
            if math.isfinite(ms)
        ]
        return fit(steps) if steps else None


def given(value: Any, here: Mapping[str, str], buckets: Buckets) -> StepTimes | None:
    """The step times of ``EngineConfig.step_time``: an object is used as it is, a file must be of this machine.

    Raises:
        ValueError: a file that is no table, one of another machine, device, dtype or model; or a table that ends before
            the largest batch, or says never to run it.
        OSError: it cannot be read.
    """
    if value is None:
        return None
    if not isinstance(value, StepTimeTable | str | os.PathLike):
        raise ValueError(f"step_time must be a StepTimeTable or the path of one, found {type(value).__name__}")
    times = StepTimes(value, measured=False) if isinstance(value, StepTimeTable) else _from_file(value, here)
    for slots in buckets.slots:
        for context in buckets.contexts_of(slots):
            row = times.table.at(context, slots)
            if row.last < slots:  # it would fail in the middle of traffic
                raise ValueError(f"step_time: its last entry is {row.last} tokens, but {slots} requests may run")
            if math.isinf(row.window(1, slots).max()):
                raise ValueError(f"step_time: {slots} requests may run, but some step without drafts is infinite there")
    return times


def _from_file(value: Any, here: Mapping[str, str]) -> StepTimes:
    table = StepTimeTable.load(value)
    wrong = table.differences(**{name: text for name, text in here.items() if name != "commit"})
    if wrong:
        raise ValueError(f"step_time: {value} was not measured here: {'; '.join(wrong)}")
    return StepTimes(table, measured=bool(table.rows))


def obtain(
    measure: Callable[[], StepTimeTable], store: Store, progress: Callable[[str], None], anew: bool
) -> StepTimes:
    """The table kept from an earlier start, else (or ``anew``) one that is measured and kept."""
    table = None if anew else store.load()
    if table is None:
        table = measure()
        store.save(table)
    else:
        progress(f"step times: those of {store.path}")
    return StepTimes(table, measured=True)


class Store:
    """Measured tables of earlier starts, one file for each machine, model and set of programs.

    Args:
        directory: None: the user's cache directory; "": nothing is kept.
        here: see ``origin.origin``.
        programs: a text that names the programs; another set of them needs another table.
    """

    def __init__(self, directory: str | None, here: Mapping[str, str], programs: str) -> None:
        self._here = dict(here)
        key = "\n".join([*(f"{name} {text}" for name, text in sorted(self._here.items())), programs])
        name = f"{self._here['model_hash'][:8]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        place = cache_directory(os.environ) / "step_time" if directory is None else Path(directory)
        self.path = None if directory == "" else place / name

    def load(self) -> StepTimeTable | None:
        """The table kept under this key, or None. A file that cannot be used is said and left alone."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            table = StepTimeTable.load(self.path)
        except (ValueError, OSError) as error:
            logger.warning("step times: %s; measuring again", error)
            return None
        wrong = table.differences(**self._here)
        if wrong:
            logger.warning("step times: %s is of another origin (%s); measuring again", self.path, "; ".join(wrong))
            return None
        return table

    def save(self, table: StepTimeTable) -> None:
        """Keeps the table for the next start, if it can be written."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as scratch:
                table.save(scratch)
        except OSError as error:
            logger.warning("step times are not kept: %s", error)


def cache_directory(environ: Mapping[str, str]) -> Path:
    """``$DSPARK_CACHE_DIR``, else ``dspark_jax`` in the user's cache directory (XDG)."""
    own = environ.get("DSPARK_CACHE_DIR")
    if own:
        return Path(own)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark_jax"
