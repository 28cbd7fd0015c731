"""How far measured step times have moved from the predicted ones, and what to do about it.

A program's ratio is measured / predicted, a running mean over its cycles. A drift of all programs alike changes no
decision; one of a few does, and only where the table is corrected by it (``EngineConfig.correct_step_times``).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque

import numpy as np

from dspark_jax.engine.buckets import Buckets, Key
from dspark_jax.engine.estimates import LAG
from dspark_jax.schedule import StepTimeTable

logger = logging.getLogger("dspark_jax.engine")

RATE, RATE_OF_ALL = 0.1, 0.02
"""Share of a new cycle in the running mean of a program, and in that of all cycles."""

LEAST = 8
"""Cycles of a program before its ratio counts."""

ODD = 2.0
"""A cycle that is further from the mean than by this factor counts as if it were that far: the machine did something
else beside it."""

WAITS = 8
"""Cycles after which a measurement is not waited for any more: not every cycle has one."""

WORTH_A_LINE = 1.25
"""By so much the mean of all cycles must have moved since it was last said."""

SILENCE = 256
"""Cycles between two lines at least: a machine with other work to do is restless."""


@dataclasses.dataclass
class Mean:
    """Running mean of a logarithm."""

    rate: float = RATE
    value: float = 0.0
    seen: int = 0

    def add(self, log_ratio: float) -> None:
        """The first ones weigh alike, whatever they are."""
        self.seen += 1
        step = log_ratio - self.value
        if self.seen > LEAST:
            step = min(max(step, -math.log(ODD)), math.log(ODD))
        self.value += max(self.rate, 1.0 / self.seen) * step


class Drift:
    """Predicted against measured, over all cycles and program by program.

    Args:
        correct: decisions use the corrected table.
    """

    def __init__(self, buckets: Buckets, correct: bool) -> None:
        self.buckets, self._correct = buckets, correct
        self.begin()

    def begin(self) -> None:
        """With a table of which nothing is known."""
        self._all, self._said, self._silent_until = Mean(RATE_OF_ALL), 0.0, LEAST
        self._programs: dict[Key, Mean] = {}
        self._unread: deque[tuple[int, Key, float]] = deque()
        self._used: dict[int, dict[Key, float]] = {}  # corrections by cycle, until its measurement is known

    def forget(self) -> None:
        """Cycles begin at 0 again: what is unread is of none of them. The means stay."""
        self._unread.clear()
        self._used.clear()

    @property
    def ratio(self) -> float:
        """Measured / predicted by the table as it was given, over all cycles; 1 before the first ones."""
        return math.exp(self._all.value)

    def observe(self, cycle: int, key: Key, predicted_ms: float, measured_ms: float) -> None:
        """A settled cycle of which both are known; ``predicted_ms`` by the table it was decided with."""
        if not (0.0 < predicted_ms < math.inf and measured_ms > 0.0):
            return
        # The ratio is to the table as it was given: the prediction had the correction of its time in it.
        log_ratio = math.log(measured_ms / predicted_ms) + self._used.pop(cycle, {}).get(key, 0.0)
        self._unread.append((cycle, key, log_ratio))
        self._all.add(log_ratio)
        if self._all.seen >= self._silent_until and abs(self._all.value - self._said) > math.log(WORTH_A_LINE):
            self._said, self._silent_until = self._all.value, self._all.seen + SILENCE
            logger.warning("step times drift: %s", self._line())

    def advance(self, cycle: int) -> None:
        """Takes in what cycle ``cycle`` may know: nothing that its own scores could have touched."""
        while self._unread and self._unread[0][0] <= cycle - LAG:
            _, key, log_ratio = self._unread.popleft()
            self._programs.setdefault(key, Mean()).add(log_ratio)
        if self._correct:
            self._used = {n: used for n, used in self._used.items() if n > cycle - WAITS}
            self._used[cycle] = {key: self._correction(key) for key in self._programs}

    def corrected(
        self, table: StepTimeTable, draft_ms: float, requests: int, slots: int, context: int
    ) -> StepTimeTable:
        """``table`` as the measured cycles would have it, where that is wanted. A cycle with drafts is measured as a
        whole, so the draft's share of the difference is put into the entry."""
        if not self._correct:
            return table
        sizes = self.buckets.tokens[slots]
        milliseconds = table.milliseconds.copy()
        for i, tokens in enumerate(table.tokens.tolist()):
            if tokens <= requests:
                key, beside = Key("plain", slots, slots, context), 0.0
            else:
                size = self.buckets.token_bucket(slots, min(tokens, sizes[-1]))
                key, beside = Key("verify", slots, size, context), draft_ms
            whole = math.exp(self._correction(key)) * (milliseconds[i] + beside)
            milliseconds[i] = max(whole - beside, 1e-3 * milliseconds[i])
        if np.array_equal(milliseconds, table.milliseconds):
            return table
        return dataclasses.replace(table, milliseconds=milliseconds)

    def _correction(self, key: Key) -> float:
        mean = self._programs.get(key)
        return mean.value if mean is not None and mean.seen >= LEAST else 0.0

    def _line(self) -> str:
        known = {key: math.exp(mean.value) for key, mean in self._programs.items() if mean.seen >= LEAST}
        text = f"cycles take {self.ratio:.2f} times what the table says"
        if known:
            worst = max(known, key=lambda key: abs(math.log(known[key])))
            text += f", {worst} {known[worst]:.2f} times"
        return text + ("; decisions follow" if self._correct else "; correct_step_times would follow it")
