"""Which numbers are in use: seeds of ``rejection`` requests that compete for admission."""

from __future__ import annotations

from collections.abc import Collection

_GOLDEN = 0x9E3779B1
_WORD = 0xFFFFFFFF


class Seeds:
    """Gives out seeds, so that no two requests share numbers that could meet.

    Two active ``rejection`` requests must not share them (DESIGN section 2, idea 4). Nor may one have those of a
    request that has ended while somebody still runs who ran beside it: what the ended one accepted has moved the
    other's share of the drafts, and that share would then be known to the newcomer's numbers.
    """

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}  # seed by request
        self._ended: list[tuple[int, set[int]]] = []  # seed, and the requests still alive that ran beside it

    def claim(self, request: int, seed: int) -> int:
        """The seed that ``request`` shall use: its own one if that is free."""
        taken = {*self._alive.values(), *(old for old, _ in self._ended)}
        self._alive[request] = claim_seed(seed, taken)
        return self._alive[request]

    def release(self, request: int) -> None:
        """A request has ended. One that claimed nothing is left alone."""
        seed = self._alive.pop(request, None)
        if seed is None:
            return
        for _, rivals in self._ended:
            rivals.discard(request)
        self._ended.append((seed, set(self._alive)))
        self._ended = [(old, rivals) for old, rivals in self._ended if rivals]


def claim_seed(seed: int, taken: Collection[int]) -> int:
    """``seed``, or hash(seed, k) with the smallest k >= 1 that is not taken: ``noise.distinct_seeds`` for requests
    that come one by one."""
    own, k = seed, 0
    while own in taken:
        k += 1
        own = _mix(_mix(seed ^ 0x452821E6) + k * _GOLDEN & _WORD)
    return own


def _mix(h: int) -> int:
    """``noise.mix`` on the host."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & _WORD
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _WORD
    return h ^ (h >> 16)
