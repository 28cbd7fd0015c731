"""The static confidence-threshold sweep (the paper's Figure 5): what cutting a block at a fixed confidence gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark_jax.evaluate.acceptance import Sample, bootstrap_weights, interval, value


def sweep(samples: Mapping[float, Sample], speeds: Mapping[float, float], resamples: int) -> list[dict[str, Any]]:
    """One entry a threshold, ascending; 0 stands for blocks verified in full.

    Each threshold was decoded, not derived: a shorter block moves every later block's anchor. A higher threshold
    raises the share of offered drafts that is accepted (``rate``) and lowers the accepted length (``tau``) and the
    drafts verified a cycle (``offered``), which is what the target pays for.
    """
    rows = []
    for threshold in sorted(samples):
        sample = samples[threshold]
        weights = bootstrap_weights(sample.suites, resamples)
        point, spread = sample.statistics(), sample.statistics(weights)
        row: dict[str, Any] = {"threshold": threshold, "tokens_per_s": speeds[threshold]}
        for name, key in (("tau", "tau/macro"), ("rate", "rate"), ("offered", "offered")):
            low, high = interval(spread[key])
            row[name] = value(float(point[key][0]), float(low), float(high))
        rows.append(row)
    return rows
