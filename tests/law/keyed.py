"""A tape whose draws are told apart by their keys: two draws with one key are one draw.

``testing.Tape`` gives every draw an outcome of its own, as fresh numbers would. The faults of a scheduler that
remembers show only where a number comes back, so here the key decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.noise import NoiseKey
from dspark_jax.types import Array

Name = Callable[[int, int, int, int], Hashable]
"""(seed, counter, offset, purpose) to what tells numbers apart."""

UNSEEN = object()
"""Name of a number that nothing depends on: it is not enumerated, the likeliest outcome stands for all."""

_FRESH = object()


def by_key(seed: int, counter: int, offset: int, purpose: int) -> Hashable:
    """As the product's noise does."""
    return seed, counter, offset, purpose


class KeyedTape:
    """Noise for worlds of neighbouring rows, one request a row.

    Args:
        outcomes: the two tokens that each request of a world can draw; one token: nothing about it is random.
        name: tells the numbers of drafts and acceptances apart. The target's own draws are always fresh: their keys
            differ between worlds.
        draws: random numbers of a world, each with two outcomes.
        at_least: worlds; those beyond the combinations have weight 0 (equal shapes share compiled operations).
    """

    def __init__(self, outcomes: tuple[tuple[int, ...], ...], name: Name, draws: int, at_least: int) -> None:
        self.outcomes, self.name, self.draws = outcomes, name, draws
        self.worlds = max(2**draws, at_least)
        self.weight = (np.arange(self.worlds) < 2**draws).astype(float)
        self.calls = 0
        self._known: dict[Hashable, tuple[np.ndarray, np.ndarray]] = {}  # outcome and its probability, by world

    @property
    def rows(self) -> int:
        return self.worlds * len(self.outcomes)

    def _digit(self) -> np.ndarray:
        self.calls += 1
        return np.arange(self.worlds) >> (self.calls - 1) & 1

    def _draw(self, key: Hashable, probability: np.ndarray) -> np.ndarray:
        """[worlds] index of one request's outcome by ``probability [worlds, outcomes]``."""
        if key in self._known:
            found, before = self._known[key]
            now = probability[np.arange(self.worlds), found]
            possible = self.weight > 0
            assert np.allclose(now[possible], before[possible]), "one number, two laws: not enumerable"
            return found
        found = self._digit()
        chosen = probability[np.arange(self.worlds), found]
        self.weight = np.where(self.weight == 0.0, 0.0, self.weight * chosen)
        if key is not _FRESH:
            self._known[key] = found, chosen
        return found

    def _key(self, key: NoiseKey, member: int, shared: bool) -> Hashable:
        if not shared:
            return _FRESH
        fields = []
        for part in (key.seed, key.counter, key.offset, key.purpose):
            values = np.unique(np.asarray(part)[member :: len(self.outcomes)])
            assert values.size == 1, "drafts and acceptances of all worlds have one key"
            fields.append(int(values[0]))
        return self.name(*fields)

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """See ``noise.Noise``."""
        best = np.array(jnp.argmax(log_probs, axis=-1))
        if np.asarray(greedy).all():
            return jnp.asarray(best, jnp.int32)
        normal = np.exp(np.asarray(jax.nn.log_softmax(log_probs, axis=-1)))
        draft = int(np.asarray(key.purpose)[0]) == 1
        for member, tokens in enumerate(self.outcomes):
            name = self._key(key, member, draft)
            if len(tokens) > 1 and name is not UNSEEN:
                rows = normal[member :: len(self.outcomes)]
                found = self._draw(name, rows[:, list(tokens)])
                best[member :: len(self.outcomes)] = np.array(tokens)[found]
        return jnp.asarray(best, jnp.int32)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """See ``noise.Noise``."""
        p = np.clip(np.asarray(prob), 0.0, 1.0)
        yes = p >= 0.5
        for member, tokens in enumerate(self.outcomes):
            if len(tokens) > 1:
                own = p[member :: len(self.outcomes)]
                found = self._draw(self._key(key, member, True), np.stack([1.0 - own, own], axis=1))
                yes[member :: len(self.outcomes)] = found == 1
        return jnp.asarray(yes)


def enumerate_keyed(
    run: Callable[[KeyedTape], Any],
    outcomes: tuple[tuple[int, ...], ...],
    draws: int,
    name: Name = by_key,
    at_least: int = 1,
) -> tuple[KeyedTape, Any]:
    """Runs ``run`` on every combination of outcomes; the number of ``draws`` must not depend on them."""
    tape = KeyedTape(outcomes, name, draws, at_least)
    result = run(tape)
    assert tape.calls == draws and abs(tape.weight.sum() - 1.0) < 1e-12
    return tape, result
