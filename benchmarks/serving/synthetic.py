"""Acceptance traces made up from a few numbers, for drafters and hardware that are not here.

The recipe. Every token t of a text has an easiness e_t, an AR(1) process (unit variance, correlation RHO between
neighbours: easy stretches last a few tokens), and every text a shift u of its own. The draft k of the block behind
token a concerns token a + k, and is accepted given those before it with probability

    p_k = sigmoid(b_k + SPREAD * u + TOKEN * e_(a+k))

b_k is such that the share of accepted drafts at k among blocks whose drafts before k were accepted is the conditional
acceptance c_k that was asked for (the paper's Figure 2 shows these by position). One uniform number a token decides:
the draft is accepted where it is below p_k. A block's survivals are the products of its p_k, so the confidence head is
calibrated, and knows what there is to know but the outcome. A text is the same whatever is admitted, as in
``traces.py``.

The figure in the paper is a picture: the numbers of ``CONDITIONAL`` are assumptions in its shape, not readings (a
Markov head keeps later positions about as likely as the first; code above mathematics above chat). A third party
reports 3.41 tokens a cycle for the published drafter of Qwen3-8B (code, temperature 1). ``--conditional`` replaces
them. MTP-1 gets the first position: a drafter as good as any at one token. SPREAD is the spread of texts as recorded
from the shipped drafter: in 96 greedy texts of 128 tokens (``results/load_smollm2_traces.npz``) ``spread_of`` is 0.23
for GSM8K, 0.23 for MT-Bench and 0.56 for HumanEval; in made-up ones of that length 0.22 with this value, 0.33 with 0.5.
TOKEN and RHO are assumptions. With them a block's confidences say more of the block two cycles later (correlation of
their sums 0.5, part of it the mixture of kinds) than real ones do (0.06, of an earlier drafter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .traces import Traces

CONDITIONAL: Mapping[str, tuple[float, ...]] = {
    "code": (0.86, 0.84, 0.83, 0.83, 0.82, 0.82, 0.82),
    "math": (0.82, 0.80, 0.79, 0.79, 0.78, 0.78, 0.78),
    "chat": (0.68, 0.64, 0.62, 0.62, 0.61, 0.61, 0.61),
}
SPREAD, TOKEN, RHO = 0.3, 1.5, 0.5


def synthetic(
    conditional: Mapping[str, Sequence[float]],
    *,
    texts: int = 128,
    tokens: int = 256,
    spread: float = SPREAD,
    seed: int = 0,
) -> Traces:
    """Traces of ``texts`` texts of each kind; their lengths vary by half around ``tokens``.

    Raises:
        ValueError: an acceptance outside (0, 1), or kinds of different widths.
    """
    widths = {len(values) for values in conditional.values()}
    if len(widths) != 1 or not all(0.0 < c < 1.0 for values in conditional.values() for c in values):
        raise ValueError("conditional: equally many acceptances in (0, 1) for every kind expected")
    rng = np.random.default_rng(seed)
    parts = [_kind(np.asarray(values), texts, tokens, spread, rng) for values in conditional.values()]
    lengths = np.concatenate([part[2] for part in parts])
    return Traces(
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        tuple(kind for kind in conditional for _ in range(texts)),
        np.ones(widths.pop()),
    )


def _kind(
    wanted: np.ndarray, texts: int, tokens: int, spread: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Survival ``[N, G]``, accepted ``[N]``, lengths ``[texts]``."""
    width, longest = wanted.size, tokens + tokens // 2
    easy = np.empty((texts, longest + width))
    easy[:, 0] = rng.standard_normal(texts)
    for t in range(1, easy.shape[1]):
        easy[:, t] = RHO * easy[:, t - 1] + np.sqrt(1 - RHO**2) * rng.standard_normal(texts)
    logit = spread * rng.standard_normal(texts)[:, None] + TOKEN * easy
    views = np.lib.stride_tricks.sliding_window_view
    around, chance = (
        views(logit, width, 1)[:, 1:],
        views(rng.random(easy.shape), width, 1)[:, 1:],
    )  # [texts, longest, G]
    survival = np.ones(around.shape)
    before = np.ones(around.shape[:2])
    for k, mean in enumerate(wanted):
        before = survival[..., k] = before * _sigmoid(around[..., k] + _base(mean, around[..., k], before))
    p = survival / np.concatenate([np.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1)
    matched = np.cumprod(chance < p, axis=-1).sum(axis=-1)
    lengths = rng.integers(tokens // 2, longest + 1, texts)
    inside = np.arange(longest) < lengths[:, None]
    left = lengths[:, None] - np.arange(longest)
    return survival[inside].astype(np.float32), np.minimum(matched, left)[inside].astype(np.int16), lengths


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _base(mean: float, around: np.ndarray, weight: np.ndarray) -> float:
    """b with the weighted mean of sigmoid(b + around) = ``mean``, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        value = float((weight * _sigmoid(middle + around)).sum() / weight.sum())
        low, high = (middle, high) if value < mean else (low, middle)
    return (low + high) / 2


def spread_of(traces: Traces) -> float:
    """Standard deviation over texts of the logit of first-draft acceptance, the sampling error of a text's share
    taken off (0 where that explains all of it)."""
    hits = np.add.reduceat((traces.accepted > 0).astype(np.float64), traces.starts[:-1])
    counts = np.diff(traces.starts)
    share = (hits + 0.5) / (counts + 1.0)
    logit = np.log(share / (1 - share))
    noise = 1.0 / (counts * share * (1 - share))
    return float(np.sqrt(max(logit.var() - noise.mean(), 0.0)))
