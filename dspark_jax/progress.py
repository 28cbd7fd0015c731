"""A progress bar for long commands: tqdm where it is installed (extra ``train``), else a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

LOG = logging.getLogger("dspark_jax.progress")
EVERY_S = 30.0
"""Seconds between the lines of the plain form."""


class Progress:
    """Counts ``done`` towards ``total`` and shows rate, time left and a short text.

    Args:
        total: units of work. done: those that an earlier process did. what: a name. unit: of what is counted.
        bar: False: lines in the log; None: a bar where standard error is a terminal and tqdm is installed.
    """

    def __init__(self, total: int, what: str, *, done: int = 0, unit: str = "it", bar: bool | None = None) -> None:
        self.total, self.what, self.unit, self.done, self.text = total, what, unit, done, ""
        self._begun, self._at_start, self._shown = time.monotonic(), done, time.monotonic()
        self._bar: Any = None
        if bar or (bar is None and sys.stderr.isatty()):
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, initial=done, desc=what, unit=unit, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, count: int = 1, text: str | None = None) -> None:
        """``count`` units more; ``text`` replaces what stands behind the numbers."""
        self.done += count
        self.text = self.text if text is None else text
        if self._bar is not None:
            self._bar.set_postfix_str(self.text, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._shown > EVERY_S or self.done >= self.total:
            self._shown = time.monotonic()
            LOG.info("%s", self.line())

    def eta_s(self) -> float | None:
        """Seconds left at the rate since the start; None before the first unit."""
        made = self.done - self._at_start
        return (self.total - self.done) * (time.monotonic() - self._begun) / made if made else None

    def line(self) -> str:
        """The plain form."""
        eta = self.eta_s()
        left = "" if eta is None else f", {clock(eta)} left"
        return f"{self.what}: {self.done}/{self.total} {self.unit}{left}{', ' if self.text else ''}{self.text}"

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
