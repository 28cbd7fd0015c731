"""What is believed about the survival of drafts that do not exist yet, from cycles at least two back.

Scores of a cycle are confidences (one row a request) or, for drafters without a confidence head, what became of its
drafts. Both are handed over when the cycle is settled and used from two cycles later on, whether cycles overlap or
not, so that the serial twin decides alike.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from dspark_jax.engine.slots import Tenant

PRIOR = 0.8
"""Conditional acceptance assumed at every position before anything was seen: optimistic, so that drafting is tried."""

DECAY = 0.9
"""Of a score's distance from the online average, with every cycle that brought no newer one."""

FORGET, WEIGHT = 0.995, 1.0
"""Of what a new pair of scores adds to the slope between them: the share that older ones keep with every cycle, and
what stands beside them at first, as sums of squares, at a slope of 1 (scores are believed until they prove fickle)."""

LEAST_ROWS, FASTEST = 9.0, 0.1
"""Rows that the online average is made of at least, the prior counting as so many at first; and what many requests can
make it forget with a cycle. Of n rows a cycle it forgets FASTEST n / (n + LEAST_ROWS): one request alone is averaged
over a hundred cycles. Over ten of them chance makes it low every now and then, drafting stops, and hardly anything
comes in any more that would correct it."""

PROBE_FIRST, PROBE_LAST = 8, 64
"""Skipped cycles before the first probe, and between later ones (doubling from one to the other)."""

LAG = 2


@dataclasses.dataclass
class Probe:
    """When to look again at what was given up: after 8, 16, 32, then every 64 cycles."""

    skipped: int = 0
    wait: int = PROBE_FIRST

    def due(self) -> bool:
        """Called once for every cycle that would skip; True: look again in this one."""
        self.skipped += 1
        if self.skipped < self.wait:
            return False
        self.skipped, self.wait = 0, min(2 * self.wait, PROBE_LAST)
        return True


@dataclasses.dataclass(frozen=True)
class Score:
    """What a settled cycle says about one request."""

    tenant: Tenant
    survival: np.ndarray  # [G] of its block, rows non-increasing
    offered: int  # drafts verified
    accepted: int
    stay: int = 0  # ``Tenant.stays`` of that cycle
    width: int | None = None  # drafts of its block, the same in the whole cycle; what is behind is not known; None: G


class Slope:
    """Running slope of a regression line through the origin, between 0 and 1. Cycles count alike, however many requests
    they have, so that it follows a load that changes."""

    def __init__(self) -> None:
        self._both = self._first = WEIGHT

    @property
    def value(self) -> float:
        return min(max(self._both / self._first, 0.0), 1.0)

    def add(self, first: np.ndarray, second: np.ndarray) -> None:
        """Pairs ``[G, N]`` of a cycle."""
        count = first.shape[1]
        self._both = FORGET * self._both + float(np.vdot(first, second)) / count
        self._first = FORGET * self._first + float(np.vdot(first, first)) / count


class Confidences:
    """Survivals by the confidence head: the request's own newest ones, on their way to the average of all.

    A block whose score was high is followed by lower ones and the other way round: scores regress to the mean. How far
    is learned from scores that lie as far apart as a decision and what it knows, LAG cycles: the slope of the later
    ones on the earlier ones, both as distances from the average that was known with the earlier. A capacity asks how
    many drafts will be how likely, and not whose they are, since those that turn out likely are the ones admitted. So
    at every position the likeliest of the requests is compared with the likeliest of then, the second with the second,
    and so on: of one request alone a high score tells little, a thousand vary as a thousand did (a slope near 1).

    Scores are compared with scores and not with what was accepted, since of a block only what was admitted shows, and
    that was chosen by its own score.
    """

    def __init__(self, drafts: int) -> None:
        self._average = PRIOR ** np.arange(1, drafts + 1)
        self._rows, self._learned = LEAST_ROWS, -1  # that it is made of; the cycle of the last ones
        self._unread: deque[tuple[int, list[Score]]] = deque()
        self._averages: dict[int, np.ndarray] = {}  # as they were known behind the last cycles
        self._widths: dict[int, int] = {}  # of the blocks of these cycles
        self._slope = Slope()

    def observe(self, cycle: int, scores: Sequence[Score]) -> None:
        """Scores of a settled cycle that drafted."""
        if scores:
            self._unread.append((cycle, list(scores)))

    def forget(self) -> None:
        """Cycles begin at 0 again: what is unread is of none of them. The averages stay, and so does the slope."""
        self._unread.clear()
        self._averages.clear()
        self._widths.clear()
        self._learned = -1

    def advance(self, cycle: int) -> None:
        """Takes in what cycle ``cycle`` may know."""
        while self._unread and self._unread[0][0] <= cycle - LAG:
            self._learn(*self._unread.popleft())

    def _learn(self, cycle: int, scores: list[Score]) -> None:
        width = scores[0].width or self._average.size
        survivals = [score.survival for score in scores]
        rows = np.asarray(survivals, np.float64)
        if width < self._average.size:
            survivals = list(rows := self._extended(rows, width))
        earlier, later = [], []  # rows of survivals, and the places of those that follow them
        for place, (score, survival) in enumerate(zip(scores, survivals, strict=True)):
            tenant = score.tenant
            if score.stay != tenant.stays:  # of before a preemption: it begins from the prior
                continue
            for known in (tenant.earlier, tenant.score):
                if known is not None and known[0] == cycle - LAG:
                    earlier.append(known[1])
                    later.append(place)
            tenant.earlier, tenant.score = tenant.score, (cycle, survival)
        if earlier and cycle - LAG in self._averages:
            places = min(width, self._widths[cycle - LAG])  # those that both say something of
            average = self._averages[cycle - LAG][:places, None]
            before, after = np.asarray(earlier, np.float64)[:, :places], rows[later][:, :places]
            self._slope.add(_ranked(before) - average, _ranked(after) - average)
        self._take_in(cycle, rows)
        self._averages = {n: a for n, a in self._averages.items() if n > cycle - LAG} | {cycle: self._average}
        self._widths = {n: w for n, w in self._widths.items() if n > cycle - LAG} | {cycle: width}

    def _take_in(self, cycle: int, rows: np.ndarray) -> None:
        """Survivals ``[N, G]`` of a cycle, into the average. What it is made of is forgotten with time and not with
        cycles that drafted, so that the few rows of probes soon count."""
        forgotten = FASTEST * len(rows) / (len(rows) + LEAST_ROWS)
        kept = self._rows * (1.0 - forgotten) ** (cycle - self._learned)
        self._rows, self._learned = max(kept, LEAST_ROWS) + len(rows), cycle
        # Of many requests that are gone much is left for long; who is still there must not wait for all of it to go.
        share = max(len(rows) / self._rows, forgotten)
        self._average = (1.0 - share) * self._average + share * rows.mean(axis=0)

    def _extended(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Survivals ``[N, G]`` of blocks of ``width`` drafts, carried on behind them by the conditional acceptances of
        the average. These stay what they are when it takes the rows in: it learns from what is known alone. Rows that
        do not increase stay so: quotients and products round in order."""
        known = self._average[width - 1]
        ratio = self._average[width:] / known if known > 0.0 else np.zeros(self._average.size - width)
        return np.concatenate([rows[:, :width], rows[:, width - 1 : width] * ratio], axis=1)

    def expected(self, rows: np.ndarray) -> np.ndarray:
        """``[N, G]`` what the blocks to come will be worth, of requests whose ``survival`` is ``rows``. Non-increasing
        as these are: a mean of two such rows is, rounded or not."""
        slope = self._slope.value
        return np.minimum(slope * rows + (1.0 - slope) * self._average, 1.0)

    def survival(self, tenant: Tenant, cycle: int) -> np.ndarray:
        """``[G]`` as last scored. A new tenant starts from the average, never from what its slot last saw."""
        return self.survivals([tenant], cycle)[0]

    def survivals(self, tenants: Sequence[Tenant], cycle: int) -> np.ndarray:
        """``[N, G]`` of each of them: one computation for all, since it is done in every cycle."""
        rows = np.empty((len(tenants), self._average.size))
        rows[:] = self._average
        kept = [1.0] * len(tenants)
        for i, tenant in enumerate(tenants):
            if tenant.score is not None:
                at, rows[i] = tenant.score
                kept[i] = DECAY ** (cycle - LAG - at)
        if min(kept) == 1.0:
            return rows
        share = np.array(kept)[:, None]
        mixed = self._average + share * (rows - self._average)
        mixed = np.clip(np.minimum.accumulate(mixed, axis=1), 0.0, 1.0)  # rounding must not let a row increase
        return np.where(share == 1.0, rows, mixed)

    def conditional(self, tenant: Tenant) -> np.ndarray | None:
        """``[G]`` acceptance of each draft given those before it, where the drafter does not say itself."""
        return None

    def fresh(self, tenant: Tenant, cycle: int) -> bool:
        """Its newest score is the newest that this cycle may know."""
        return tenant.score is not None and tenant.score[0] == cycle - LAG


def _ranked(rows: np.ndarray) -> np.ndarray:
    """``[G, N]``: at each position the survivals of N requests ``[N, G]``, in order."""
    return np.sort(rows.T, axis=1)


class Acceptances(Confidences):
    """For drafters without a confidence head: the share of drafts accepted at each position, given that those before
    it were. A request's own share counts as much as its own drafts are many; WEIGHT drafts of all stand beside them.

    What a cycle's drafts became is known only after it, so this is a function of what precedes them.
    """

    WEIGHT = 4.0
    FORGET_ALL, FORGET_OWN = 0.995, 0.95

    def __init__(self, drafts: int) -> None:
        super().__init__(drafts)
        self._all = np.tile([self.WEIGHT * PRIOR, self.WEIGHT], (drafts, 1)).T  # accepted, tried: [2, G]

    def _learn(self, cycle: int, scores: list[Score]) -> None:
        for score in scores:
            place = np.arange(self._average.size)
            tried = place < min(score.accepted + 1, score.offered)
            new = np.stack([tried & (place < score.accepted), tried]).astype(np.float64)
            if score.stay == score.tenant.stays:
                own = score.tenant.acceptances
                score.tenant.acceptances = new if own is None else self.FORGET_OWN * own + new
                score.tenant.score = (cycle, np.empty(0))
            self._all = np.where(tried, self.FORGET_ALL * self._all + new, self._all)

    def conditional(self, tenant: Tenant) -> np.ndarray:
        """``[G]`` acceptance given that the drafts before were accepted."""
        share = self._all[0] / self._all[1]
        if tenant.acceptances is None:
            return share
        accepted, tried = tenant.acceptances
        return (accepted + self.WEIGHT * share) / (tried + self.WEIGHT)

    def survivals(self, tenants: Sequence[Tenant], cycle: int) -> np.ndarray:
        return np.cumprod([self.conditional(tenant) for tenant in tenants], axis=1)

    def expected(self, rows: np.ndarray) -> np.ndarray:
        """They are means already."""
        return rows
