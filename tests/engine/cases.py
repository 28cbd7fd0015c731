"""Models, requests and references for the engine's tests. Scripted models compile fast and read NaN from any
wrong cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.engine.adaptive import Lagged
from dspark_jax.engine.step_times import StepTimes
from dspark_jax.generate import generate
from dspark_jax.nn.norm import rms_norm
from dspark_jax.schedule import StepTimeTable
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget, tiny_target
from tests.drafters.chain_cases import tiny_chain

VOCAB, BLOCK, WINDOW = 7, 3, 48
CHAIN_BLOCK = 5
Models = tuple[ScriptedTarget, ScriptedDrafter]
PROMPT, NEW = 16, 16  # longest ones of the references


def scripted_models(seed: int = 0, max_positions: int = WINDOW) -> Models:
    """A target and a drafter that agree often, not always; confidences are about right. Call it under x64."""
    rng = np.random.default_rng(seed)
    contexts = (VOCAB + 1) ** 2
    target = 1.5 * rng.normal(size=(contexts, VOCAB))
    drafter = target[None] + 0.7 * rng.normal(size=(BLOCK, contexts, VOCAB))
    confidence = rng.normal(size=(BLOCK, contexts)) + 1.0
    return (
        ScriptedTarget(jnp.asarray(target), order=2, max_positions=max_positions),
        ScriptedDrafter(jnp.asarray(drafter), jnp.asarray(confidence), vocab_size=VOCAB, order=2),
    )


def chain_models() -> tuple[ScriptedTarget, Any]:
    """A bigram target as a table, and an EAGLE-3 chain that reads its token ids as features. The block is longer
    than the drafter's own of 4."""
    target = tiny_target(vocab_size=VOCAB, dtype=jnp.float64)
    drafter: Any = tiny_chain(target, "eagle3").drafter
    normed = rms_norm(target.params["embed_tokens"], None, 1e-6)
    bigrams = 0.2 * normed @ target.params["lm_head"].T
    table = jnp.concatenate([bigrams, jnp.zeros((1, VOCAB))])
    fc = jax.random.normal(jax.random.key(5), (target.config.hidden_size, len(drafter.taps)), jnp.float64)
    return ScriptedTarget(table, max_positions=64), drafter.replace(params={**drafter.params, "fc": 0.1 * fc})


def engine_config(**changes: Any) -> EngineConfig:
    """Small buckets: few programs, and every kind of them."""
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": WINDOW,
        "mode": "fixed",
        "prefill_buckets": (8,),
        "slot_buckets": (1, 4),
        "max_programs": 1,  # no finer buckets than asked for
        "profile_dir": "",
        "seed": 0,
    }
    return EngineConfig(**{**values, **changes})


def step_times(slope: float = 0.1, draft_ms: float = 0.1) -> StepTimeTable:
    """1 ms and ``slope`` a token more: drafts pay if they are likely enough."""
    tokens = list(range(1, 33))
    return StepTimeTable(tokens=tokens, milliseconds=[1 + slope * t for t in tokens], draft_ms=draft_ms)


FORWARDS: list[int] = []
"""Flat tokens of every forward that was traced for a ``Watched`` target."""


@flax.struct.dataclass
class Watched(ScriptedTarget):
    """Writes down what its forward is given."""

    def forward(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        FORWARDS.append(tokens.shape[0])
        return super().forward(tokens, *arguments, **options)


def fresh(engine: Engine, *, overlap: bool = True) -> Engine:
    engine.reset()
    engine.overlap = overlap
    return engine


def as_new(engine: Engine, overlap: bool = True) -> Engine:
    """The scheduler's engine without requests and without what its policy has learned."""
    engine._policy = Lagged(engine.buckets.drafts)
    engine._times = StepTimes(step_times(), measured=False)
    return fresh(engine, overlap=overlap)


def behind_draft(engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Has ``act`` done between draft and verify of the cycle that is the ``number``-th to draft."""
    draft, drafts = engine._draft, [0]

    def draft_and_act(plan: Any) -> Any:
        made = draft(plan)
        drafts[0] += 1
        if drafts[0] == number:
            act()
        return made

    monkeypatch.setattr(engine, "_draft", draft_and_act)


def random_requests(count: int, seed: int, **changes: Any) -> list[Request]:
    """Requests of all kinds side by side; ``changes`` fix a field of all of them."""
    rng = np.random.default_rng(seed)
    kinds = (
        {"sampling": Sampling(temperature=0.0)},
        {"sampling": Sampling(temperature=0.8), "verification": "rejection"},
        {"sampling": Sampling(temperature=0.8), "verification": "coupled"},
    )
    requests = []
    for i in range(count):
        values: dict[str, Any] = {
            "prompt_ids": rng.integers(0, VOCAB, rng.integers(1, PROMPT + 1)).tolist(),
            "max_new_tokens": int(rng.integers(1, NEW + 1)),
            "seed": int(rng.integers(2**32)),
            **kinds[i % len(kinds)],
            **changes,
        }
        requests.append(Request(**values))
    return requests


Expected = list[tuple[list[int], list[int], list[int]]]  # tokens, committed, offered


def expected(models: Models, requests: Sequence[Request], **options: Any) -> Expected:
    """What ``generate`` makes of each request: one batch for each way of sampling, always of the same shape (two
    stop tokens included), so that it is compiled once."""
    options.setdefault("stop_token_ids", (VOCAB, VOCAB + 1))
    target, drafter = models
    rows = 8
    found: dict[int, tuple[list[int], list[int], list[int]]] = {}
    groups: dict[tuple[Sampling, str], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault((request.sampling, request.verification or "coupled"), []).append(i)
    for (sampling, verification), members in groups.items():
        for begin in range(0, len(members), rows):
            part = members[begin : begin + rows]
            prompts = np.zeros((rows, PROMPT), np.int32)
            lengths, seeds = np.ones(rows, np.int32), np.zeros(rows, np.uint32)
            for row, i in enumerate(part):
                ids = list(requests[i].prompt_ids)
                prompts[row, : len(ids)] = ids
                lengths[row], seeds[row] = len(ids), requests[i].seed or 0
            out = generate(
                target, drafter, jnp.asarray(prompts), jnp.asarray(lengths), seeds=jnp.asarray(seeds),
                max_new_tokens=NEW, sampling=sampling, verification=verification, **options,
            )  # fmt: skip
            for row, i in enumerate(part):
                found[i] = _cut(
                    np.asarray(out.tokens[row]), out.committed[row], out.offered[row], requests[i].max_new_tokens
                )
    return [found[i] for i in range(len(requests))]


def _cut(tokens: np.ndarray, committed: Any, offered: Any, limit: int) -> tuple[list[int], list[int], list[int]]:
    """The first ``limit`` tokens of a longer run: a limit shortens no block, it cuts the last cycle."""
    kept, left = [], limit - 1
    for count in np.asarray(committed).tolist():
        if left == 0 or count == 0:
            break
        kept.append(min(count, left))
        left -= kept[-1]
    return tokens[:limit].tolist(), kept, np.asarray(offered)[: len(kept)].tolist()


def run_all(engine: Engine, requests: Sequence[Request]) -> Expected:
    """Submits requests together, runs the engine, returns (tokens, committed, offered) in their order."""
    ids = [engine.submit(request) for request in requests]
    results = engine.run()
    return [(results[i].tokens, results[i].committed, results[i].offered) for i in ids]
