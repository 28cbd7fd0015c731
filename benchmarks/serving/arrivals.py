"""When requests come. Both kinds hand out arrival times in order; a request is known by its number."""

from __future__ import annotations

import math
from collections import deque

import numpy as np


class Closed:
    """So many users, each of whom asks again as soon as it is answered."""

    def __init__(self, users: int) -> None:
        self._due: deque[float] = deque([0.0] * users)

    def answered(self, now: float) -> None:
        """A request ended at ``now`` seconds."""
        self._due.append(now)

    def next_time(self) -> float:
        """Seconds of the next arrival; infinite where none is known."""
        return self._due[0] if self._due else math.inf

    def take(self) -> float:
        """Takes the next arrival."""
        return self._due.popleft()


class Poisson:
    """So many requests a second on average, whoever has been answered."""

    def __init__(self, rate: float, seed: int) -> None:
        if not rate > 0.0:
            raise ValueError(f"rate: requests per second > 0 expected, got {rate}")
        self._rng, self._mean = np.random.default_rng(seed), 1.0 / rate
        self._next = self._rng.exponential(self._mean)

    def answered(self, now: float) -> None:
        pass

    def next_time(self) -> float:
        return self._next

    def take(self) -> float:
        now, self._next = self._next, self._next + self._rng.exponential(self._mean)
        return now
