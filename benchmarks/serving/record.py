"""Records acceptance traces from real decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dspark_jax import Engine
from dspark_jax.engine.report import CycleReport
from dspark_jax.types import GREEDY_TEMPERATURE

from .traces import Traces, from_texts
from .workload import Workload


def record(
    engine: Engine,
    workload: Workload,
    count: int,
    concurrency: int,
    calibration: Any = None,
    say: Callable[[str], None] = print,
) -> Traces:
    """Decodes ``count`` requests token by token, drafting a block behind each one and verifying none of it.

    Args:
        engine: idle, of mode ``threshold``: it drafts in every cycle. Its threshold is raised to 1 meanwhile.
        workload: at a temperature above 0 its requests are made ``coupled``, so that the text does not depend on
            what is admitted.
        calibration: the one that the engine uses.

    Raises:
        ValueError: an engine of another mode, or no text of at least two tokens.
    """
    if engine.mode != "threshold":
        raise ValueError(f"traces are recorded by mode threshold, found {engine.mode}")
    blocks: dict[int, list[tuple[np.ndarray, np.ndarray, int]]] = {}
    watching = True

    def watch(report: CycleReport) -> None:
        if not watching or report.survival is None or report.drafts is None:
            return
        for row, request in enumerate(report.requests):
            found = blocks.setdefault(request, [])
            found.append((report.survival[row], report.drafts[row], int(report.offered[row])))

    engine.watch(watch)
    before, engine.config = engine.config, dataclasses.replace(engine.config, confidence_threshold=1.0)
    try:
        texts, kinds = _decode(engine, workload, count, concurrency, say)
    finally:
        engine.config, watching = before, False
    kept = [
        request
        for request, text in texts.items()
        if len(text) > 1 and len(blocks.get(request, ())) == len(text) - 1 and not any(b[2] for b in blocks[request])
    ]
    if not kept:
        raise ValueError("traces: no text of two tokens or more")
    say(f"traces: {len(kept)} of {len(texts)} texts, {sum(len(texts[r]) - 1 for r in kept)} blocks")
    rows = [blocks[request] for request in kept]
    return from_texts(
        [texts[request] for request in kept],
        [np.stack([b[1] for b in found]) for found in rows],
        [np.stack([b[0] for b in found]) for found in rows],
        [kinds[request] for request in kept],
        *correction(calibration, workload, rows[0][0][0].size),
    )


def _decode(
    engine: Engine, workload: Workload, count: int, concurrency: int, say: Callable[[str], None]
) -> tuple[dict[int, Sequence[int]], dict[int, str]]:
    """Tokens and kinds by request id, at most ``concurrency`` requests at once."""
    changes: dict[str, Any] = {"verification": "coupled"} if workload.sampling.temperature > 0 else {}
    order = workload.order(0xACCE97)
    texts: dict[int, Sequence[int]] = {}
    kinds: dict[int, str] = {}
    while len(texts) < count:
        while len(kinds) < count and len(kinds) - len(texts) < concurrency:
            prompt = next(order)
            request = workload.request(prompt, len(kinds), **changes)
            kinds[engine.submit(request)] = workload.kinds[prompt]
        for event in engine.step():
            if event.result is not None:
                texts[event.id] = event.result.tokens
                if len(texts) % 16 == 0:
                    say(f"traces: {len(texts)} of {count} texts")
    return texts, kinds


def correction(calibration: Any, workload: Workload, width: int) -> tuple[np.ndarray, float]:
    """Temperatures ``[G]`` and shift of a calibration for this workload; 1 and 0 where there is none."""
    if hasattr(calibration, "pick"):
        greedy = workload.sampling.temperature < GREEDY_TEMPERATURE
        calibration = calibration.pick("rejection" if greedy else "coupled", 0.0 if greedy else 1.0)
    if calibration is None:
        return np.ones(width), 0.0
    return np.asarray(calibration.temperature, np.float64)[:width], float(calibration.shift or 0.0)
