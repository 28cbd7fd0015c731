"""Prompts, and the endless row of requests that a cell of load is fed with: the same ones for every arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import Request, Sampling
from dspark_jax.data.prompts import read_prompts


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is asked of an engine.

    Attributes:
        prompts: token ids. kinds: a word for each (the stem of its file).
        limit: new tokens a request. verification: rule of all requests. seed: of the order.
    """

    prompts: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    limit: int
    sampling: Sampling = Sampling(temperature=0.0)
    verification: str = "rejection"
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def order(self, *key: int) -> Iterator[int]:
        """Prompt numbers without an end, each pass over all of them in its own order; equal for equal keys."""
        rng = np.random.default_rng([self.seed, *key])
        while True:
            yield from rng.permutation(len(self.prompts)).tolist()

    def request(self, prompt: int, seed: int, limit: int | None = None, **changes: Any) -> Request:
        """``limit``: other than the workload's own."""
        values = {
            "prompt_ids": self.prompts[prompt],
            "max_new_tokens": self.limit if limit is None else limit,
            "sampling": self.sampling,
            "seed": seed,
            "verification": self.verification,
            "stop_token_ids": self.stop_token_ids,
        }
        return Request(**{**values, **changes})

    def feed(self, concurrency: int, *key: int) -> Iterator[Request]:
        """Requests of a closed loop. The first ``concurrency`` ones are of every age, as if the loop had run for long:
        requests that begin together also end together, and prompts then come in waves."""
        ages = np.random.default_rng([self.seed, *key, concurrency]).permutation(concurrency)
        for number, prompt in enumerate(self.order(*key)):
            share = (1 + ages[number]) / concurrency if number < concurrency else 1.0
            yield self.request(prompt, number, max(1, round(share * self.limit)))


def read(paths: Sequence[str], tokenizer: Any, longest: int) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Prompts of at most ``longest`` tokens, and the stems of their files.

    Raises:
        ValueError: none is short enough, or a file holds none.
        FileNotFoundError: no such file.
    """
    prompts, kinds = [], []
    for path in paths:
        for prompt in read_prompts(path):
            ids = prompt.encode(tokenizer)
            if len(ids) <= longest:
                prompts.append(ids)
                kinds.append(Path(path).stem)
    if not prompts:
        raise ValueError(f"prompts: none of at most {longest} tokens in {', '.join(paths)}; raise --max-model-len")
    return tuple(prompts), tuple(kinds)
