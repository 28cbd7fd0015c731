"""Straightforward references for the law tests: one distribution, the law of whole texts, the law of emitted tokens.

NumPy, float64, sorting allowed, written from the definitions and not from the code under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dspark_jax.config import Sampling

FALSE_ALARM = 1e-6
"""Smallest p-value a statistical test accepts."""


@dataclass(frozen=True)
class Strengths:
    """Penalties of a request; the defaults are off."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """``[V]`` what is sampled: temperature, top-k, top-p, min-p in this order; ties at an edge are kept."""
    logits = np.asarray(logits, np.float64)
    if sampling.temperature < 1e-5:
        return (np.arange(logits.size) == np.argmax(logits)).astype(np.float64)
    # The settings are stored as float32.
    x = logits / float(np.float32(sampling.temperature))
    if sampling.top_k:
        edge = np.sort(x)[::-1][min(sampling.top_k, x.size) - 1]
        x = np.where(x >= edge, x, -np.inf)
    if sampling.top_p < 1.0:
        p = _softmax(x)
        descending = np.sort(p)[::-1]
        last = np.searchsorted(np.cumsum(descending), float(np.float32(sampling.top_p)))
        x = np.where(p >= descending[min(last, p.size - 1)], x, -np.inf)
    if sampling.min_p > 0.0:
        p = _softmax(x)
        x = np.where(p >= float(np.float32(sampling.min_p)) * p.max(), x, -np.inf)
    return _softmax(x)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def penalised(logits: np.ndarray, prompt: Sequence[int], made: Sequence[int], strengths: Strengths) -> np.ndarray:
    """``[V]`` logits under repetition (prompt included), frequency and presence penalties (generated tokens only)."""
    out = np.array(logits, np.float64)
    for token in range(out.size):
        times = list(made).count(token)
        if times or token in prompt:
            factor = float(np.float32(strengths.repetition))
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= float(np.float32(strengths.frequency)) * times
        out[token] -= float(np.float32(strengths.presence)) * (times > 0)
    return out


def next_token(
    table: np.ndarray,
    order: int,
    prompt: Sequence[int],
    made: Sequence[int],
    sampling: Sampling,
    strengths: Strengths = Strengths(),  # noqa: B008 - frozen
) -> np.ndarray:
    """``[V]`` law of the token behind ``prompt + made`` for a table of the last ``order`` tokens."""
    size = table.shape[-1]
    text = [size] * order + list(prompt) + list(made)
    index = 0
    for token in text[len(text) - order :]:
        index = index * (size + 1) + token
    return distribution(penalised(table[index], prompt, made, strengths), sampling)


def text_law(
    table: np.ndarray,
    order: int,
    prompt: Sequence[int],
    horizon: int,
    sampling: Sampling,
    strengths: Strengths = Strengths(),  # noqa: B008 - frozen
) -> np.ndarray:
    """``[V ** horizon]`` probability of every continuation of ``horizon`` tokens, first token most significant."""
    size = table.shape[-1]
    law = np.ones(1)
    for length in range(horizon):
        rows = [
            next_token(table, order, prompt, made, sampling, strengths)
            for made in itertools.product(range(size), repeat=length)
        ]
        law = (law[:, None] * np.stack(rows)).reshape(-1)
    return law


def emitted_law(
    tokens: np.ndarray, count: np.ndarray, weight: np.ndarray, scenario: np.ndarray, law: np.ndarray, size: int
) -> np.ndarray:
    """``[scenarios, V ** horizon]``: law of texts that begin with what was emitted and go on as the target would.

    It equals ``law`` if and only if the emitted tokens, however many, are the target's (a number of tokens that
    depended on the tokens themselves in a forbidden way shows as well).

    Args:
        tokens: ``[N, M]`` emitted tokens of every branch, the first ``count [N]`` of them real.
        weight: ``[N]`` probabilities. scenario: ``[N]`` ints from 0. law: ``[V ** horizon]`` of the target.
    """
    scenarios = int(scenario.max()) + 1
    found = np.zeros((scenarios, law.size))
    for length in range(tokens.shape[1] + 1):
        chosen = (count == length) & (weight > 0)
        code = np.zeros(int(chosen.sum()), np.int64)
        for k in range(length):
            code = code * size + tokens[chosen, k]
        cells = size**length
        mass = np.bincount(scenario[chosen] * cells + code, weight[chosen], scenarios * cells)
        by_prefix = law.reshape(cells, -1)
        total = by_prefix.sum(axis=1, keepdims=True)
        # A prefix that the target never writes keeps its mass, spread out, so that it shows.
        rest = np.where(total > 0, by_prefix / np.where(total > 0, total, 1.0), 1.0 / by_prefix.shape[1])
        found += (mass.reshape(scenarios, cells)[:, :, None] * rest[None]).reshape(scenarios, -1)
    return found


def p_value(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Of the chi-square statistic of cell counts (all cells possible, one constraint)."""
    with jax.enable_x64(True):
        statistic = float(((counts - expected) ** 2 / expected).sum())
        freedom = counts.size - 1
        return float(jax.scipy.special.gammaincc(freedom / 2.0, statistic / 2.0))
