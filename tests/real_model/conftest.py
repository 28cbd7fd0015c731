"""One loaded SmolLM2 for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dspark_jax import load_drafter, load_target
from dspark_jax.drafters import Drafter
from dspark_jax.load import SHIPPED_DRAFTERS
from dspark_jax.targets import Target

QUESTIONS = (
    "Give me three tips for sleeping better.",
    "Write a Python function that returns the factorial of a number.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "What is the difference between a list and a tuple in Python?",
)


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The embedded target in float32; skips where its package is missing."""
    try:
        return load_target("smollm2-135m-instruct", dtype="float32")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=SHIPPED_DRAFTERS)
def shipped_drafter(smollm2: Target, request: pytest.FixtureRequest) -> Iterator[Drafter]:
    """The drafters that the package ships for it, one after the other."""
    yield load_drafter(request.param, smollm2, dtype="float32")


@pytest.fixture(scope="session")
def chats(smollm2: Target) -> list[list[int]]:
    """Token ids of five questions in the chat template."""
    tokenizer = smollm2.tokenizer
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
