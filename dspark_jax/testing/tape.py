"""Noise for tests: a tape that walks every branch of a computation, and numbers read from a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.noise import PLAIN, NoiseKey
from dspark_jax.types import Array, concrete

Result = TypeVar("Result")


class Tape:
    """Noise that walks every branch, one branch a world; a world is ``group`` neighbouring rows.

    Every draw of every row of a world is a digit of the world's number, so the worlds together are all combinations
    of outcomes, and ``weight`` is each one's exact probability. Runs outside of a trace only. Use ``enumerate_worlds``.
    """

    def __init__(self, arities: list[int] | None, group: int = 1, at_least: int = 1) -> None:
        self.group = group
        self.recording = arities is None
        self.arities: list[int] = [] if arities is None else arities
        self.calls = 0
        combinations = 1 if arities is None else math.prod(arities)
        self.worlds = max(combinations, at_least)
        self.rows = self.worlds * group
        self.log_probs: list[Array] = []  # [rows, V], of every categorical draw in order
        self.picks: list[np.ndarray] = []  # [rows], of every pick in order
        self._weight = (np.arange(self.worlds) < combinations).astype(np.float64)

    def _digits(self, arity: int) -> np.ndarray:
        """``[rows]`` the outcome of this draw in every row."""
        columns = []
        for _ in range(self.group):
            if self.recording:
                self.arities.append(arity)
            if self.calls >= len(self.arities) or self.arities[self.calls] != arity:
                raise RuntimeError(f"draw {self.calls} has {arity} outcomes, announced were {self.arities}")
            below = 1 if self.recording else math.prod(self.arities[self.calls + 1 :])
            columns.append(np.arange(self.worlds) // below % (1 if self.recording else arity))
            self.calls += 1
        return np.stack(columns, axis=1).reshape(-1)

    def _multiply(self, probability: np.ndarray) -> None:
        factor = probability.reshape(self.worlds, self.group).prod(axis=1)
        # A world that has probability 0 already may compute nonsense from there on.
        self._weight = np.where(self._weight == 0.0, 0.0, self._weight * factor)

    @property
    def weight(self) -> np.ndarray:
        """``[worlds]`` float64 probabilities; they sum to the number of scenarios (see ``pick``)."""
        if np.isnan(self._weight).any():
            raise RuntimeError("a possible world met a NaN probability")
        return self._weight

    def pick(self, options: int) -> np.ndarray:
        """``[rows]`` a choice of the test's own (not a draw): every option is a scenario of weight 1. The rows of a
        world choose independently."""
        self.picks.append(self._digits(options))
        return self.picks[-1]

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """See ``noise.Noise``."""
        fixed = np.asarray(_known(greedy))
        best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        if fixed.all():
            return best
        if log_probs.shape[0] != self.rows:
            raise RuntimeError(f"{log_probs.shape[0]} rows are drawn for, the tape has {self.rows}")
        index = np.where(fixed, np.asarray(best), self._digits(log_probs.shape[-1]))
        self.log_probs.append(log_probs)
        normal = np.asarray(jax.nn.log_softmax(log_probs, axis=-1))[np.arange(self.rows), index]
        self._multiply(np.where(fixed, 1.0, np.exp(normal)))
        return jnp.asarray(index, jnp.int32)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """See ``noise.Noise``."""
        yes = self._digits(2) == 1
        p = np.clip(np.asarray(_known(prob)), 0.0, 1.0)
        self._multiply(np.where(yes, p, 1.0 - p))
        return jnp.asarray(yes)


def _known(x: Array) -> np.ndarray:
    known = concrete(x)
    if known is None:
        raise RuntimeError("a tape runs outside of a trace only")
    return known


def enumerate_worlds(
    run: Callable[[Tape], Result], group: int = 1, arities: Sequence[int] | None = None, at_least: int = 1
) -> tuple[Tape, Result]:
    """Runs ``run(tape)`` on ``tape.rows`` rows, so that every combination of outcomes is one world.

    ``arities`` are the numbers of outcomes of every draw, in order; None: ``run`` is first called on a single world
    to count them. The number of draws must not depend on their outcomes. Worlds of weight 0 are added up to
    ``at_least``, so that cases of different size share their compiled operations.
    """
    if arities is None:
        probe = Tape(None, group)
        run(probe)
        arities = probe.arities
    tape = Tape(list(arities), group, at_least)
    result = run(tape)
    if tape.calls != len(tape.arities):
        raise RuntimeError(f"{len(tape.arities)} draws were announced, {tape.calls} made")
    return tape, result


class GumbelTable:
    """Noise read from ``values [tapes, positions, V]``: the row's seed names its tape.

    For ``coupled`` and plain decoding only: a draw with another key gives the index -1, an acceptance number False.
    """

    def __init__(self, values: Array) -> None:
        self.values = values

    def categorical(self, log_probs: Array, key: NoiseKey, ids: Array | None, greedy: Array) -> Array:
        """See ``noise.Noise``."""
        g = self.values[key.seed.astype(jnp.int32), key.counter]
        g = g if ids is None else g[:, ids]
        index = jnp.argmax(log_probs + jnp.where(greedy[:, None], 0.0, g), axis=-1)
        return jnp.where(greedy | (key.purpose == PLAIN), index, -1).astype(jnp.int32)

    def accept(self, prob: Array, key: NoiseKey) -> Array:
        """See ``noise.Noise``."""
        return jnp.zeros(prob.shape, bool)
