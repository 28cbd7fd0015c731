"""The embedded model against transformers with torch, and speculation against plain decoding on it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, generate
from dspark_jax.drafters import Drafter
from dspark_jax.evaluate.torch_reference import torch_llama
from dspark_jax.generate import GenerateOutput
from dspark_jax.targets import Target
from dspark_jax.types import EMPTY
from tests.real_model.near_ties import Comparison, all_logits

pytestmark = pytest.mark.real_model
LEAST_LENGTH = 1.25


def batch(chats: list[list[int]]) -> tuple[jnp.ndarray, jnp.ndarray]:
    longest = max(map(len, chats))
    prompts = np.zeros((len(chats), longest), np.int32)
    for row, ids in enumerate(chats):
        prompts[row, : len(ids)] = ids
    return jnp.asarray(prompts), jnp.asarray([len(ids) for ids in chats], jnp.int32)


@pytest.fixture(scope="module")
def torch_model(smollm2: Target) -> Any:
    """transformers' Llama in float32 on the very same dequantised weights."""
    pytest.importorskip("torch", reason="the reference comparison needs torch (extra `torch`)")
    return torch_llama("smollm2-135m-instruct")


def test_logits_equal_transformers_within_2e_3(smollm2: Target, torch_model: Any, chats: list[list[int]]) -> None:
    import torch

    worst = 0.0
    for ids in chats:
        with torch.no_grad():
            wanted = torch_model(torch.tensor([ids])).logits[0].numpy()
        worst = max(worst, float(np.abs(all_logits(smollm2, ids) - wanted).max()))
    print(f"largest logit difference to transformers: {worst:.2e}")
    assert worst <= 2e-3


def test_greedy_text_equals_transformers_for_5_prompts_of_128_tokens(
    smollm2: Target, torch_model: Any, chats: list[list[int]]
) -> None:
    import torch

    ours = _greedy(smollm2, None, chats, 128)
    comparison = Comparison(smollm2)
    for row, ids in enumerate(chats):
        theirs = torch_model.generate(torch.tensor([ids]), max_new_tokens=128, do_sample=False)[0, len(ids) :].numpy()
        comparison.texts(ids, np.asarray(ours.tokens[row]), theirs)
    comparison.finish()


@pytest.mark.parametrize("drafts", [1, 3, 5, 7])
def test_greedy_speculative_text_equals_plain_text(
    smollm2: Target, shipped_drafter: Drafter, chats: list[list[int]], drafts: int
) -> None:
    comparison = Comparison(smollm2)
    _compare(smollm2, shipped_drafter, chats, comparison, num_speculative_tokens=drafts, max_new_tokens=96)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_coupled_text_equals_plain_sampled_text_of_the_same_seed(
    smollm2: Target, shipped_drafter: Drafter, chats: list[list[int]], temperature: float
) -> None:
    comparison = Comparison(smollm2, temperature)
    _compare(smollm2, shipped_drafter, chats, comparison, verification="coupled", max_new_tokens=96)


def test_a_shipped_drafter_shortens_the_work(smollm2: Target, shipped_drafter: Drafter, chats: list[list[int]]) -> None:
    """Accepted length, greedy, whole blocks: 1 is what weights that mean nothing give."""
    out = _greedy(smollm2, shipped_drafter, chats, 96)
    cycles = [row[row > 0][:-1] for row in np.asarray(out.committed)]  # the last one was cut by the limit
    tau = np.concatenate(cycles).mean()
    print(f"{shipped_drafter.name}: accepted length {tau:.2f} over {sum(map(len, cycles))} cycles")
    assert tau >= LEAST_LENGTH


def _greedy(target: Target, drafter: Drafter | None, chats: list[list[int]], max_new_tokens: int) -> GenerateOutput:
    prompts, lengths = batch(chats)
    return generate(
        target,
        drafter,
        prompts,
        lengths,
        seeds=jnp.zeros(len(chats), jnp.uint32),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=0.0),
        stop_token_ids=target.config.eos_token_ids,
    )


def _compare(target: Target, drafter: Drafter, chats: list[list[int]], comparison: Comparison, **options: Any) -> None:
    prompts, lengths = batch(chats)
    seeds = np.arange(11, 11 + len(chats), dtype=np.uint32)
    shared = {
        "seeds": jnp.asarray(seeds),
        "max_new_tokens": options.pop("max_new_tokens"),
        "sampling": Sampling(temperature=comparison.temperature),
        "stop_token_ids": target.config.eos_token_ids,
    }
    plain = generate(target, None, prompts, lengths, **shared)
    fast = generate(target, drafter, prompts, lengths, **shared, **options)
    for row, ids in enumerate(chats):
        comparison.texts(ids, np.asarray(plain.tokens[row]), np.asarray(fast.tokens[row]), int(seeds[row]))
    comparison.finish()
    assert int(jnp.sum(fast.tokens != EMPTY)) == int(jnp.sum(fast.lengths))
    assert bool(jnp.all(1 + fast.committed.sum(1) == fast.lengths))
