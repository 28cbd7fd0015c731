"""Held-out measurement: teacher-forced acceptance per block width and position, and what it would mean in tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dspark_jax.data.packing import BlockPlan
from dspark_jax.data.records import Records


def measure(
    step: Callable[..., Any],
    params: Any,
    frozen: Any,
    records: Records,
    plan: BlockPlan,
    data: Any,
    everywhere: Callable[[Any], Any] = lambda x: x,
) -> dict:
    """Runs the first ``data.heldout_batches`` batches with anchors that are the same at every call.

    Args:
        step: ``step.make_heldout_step``. data: a ``DataConfig``. everywhere: puts inputs on all devices.
    """
    parts = []
    for i in range(data.heldout_batches):
        batch = records.batch(range(i * data.batch, (i + 1) * data.batch), data.length)
        key = jax.random.fold_in(jax.random.key(0), i)
        tokens, learnt = everywhere((batch.tokens, batch.loss_mask))
        parts.append(jax.tree.map(np.asarray, step(params, frozen, key, tokens, learnt)))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return summary(plan, **joined)


def summary(plan: BlockPlan, rate: np.ndarray, agree: np.ndarray, confidence: np.ndarray, mask: np.ndarray) -> dict:
    """Metrics of ``[N, T]`` slot values, by block width w (its block makes w drafts).

    ``tau`` is 1 + the sum of cumulative products of 1 - TV: the expected accepted length at temperature 1 along the
    text; ``greedy`` the same with agreement of arg-max; ``accept`` the mean 1 - TV per position; ``confidence`` the
    head's mean probability there. Blocks that end early in their text are left out of tau.
    """
    result: dict[str, Any] = {}
    starts = np.cumsum((0, *plan.widths[:-1]))
    for width in sorted(set(plan.widths)):
        first = starts[np.asarray(plan.widths) == width]
        at = first[:, None] + np.arange(width)
        good = mask[:, at].all(-1)
        blocks = {"rate": rate[:, at][good], "agree": agree[:, at][good], "sure": confidence[:, at][good]}
        result[f"width_{width}"] = {
            "blocks": int(good.sum()),
            "tau": _tau(blocks["rate"]),
            "greedy": _tau(blocks["agree"]),
            "accept": [round(float(x), 4) for x in blocks["rate"].mean(0)],
            "confidence": [round(float(x), 4) for x in blocks["sure"].mean(0)],
        }
    return result


def _tau(rate: np.ndarray) -> float:
    return round(float(1 + np.cumprod(rate, axis=1).sum(1).mean()), 4)
