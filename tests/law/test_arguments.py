"""generate() refuses what it cannot decode, naming the argument; nothing is compiled for that."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, generate
from dspark_jax.schedule import StepTimeTable
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget

TARGET = ScriptedTarget(jnp.zeros((4, 3)), max_positions=32)
DRAFTER = ScriptedDrafter(jnp.zeros((2, 4, 3)))
CONFIDENT = ScriptedDrafter(jnp.zeros((2, 4, 3)), confidence=jnp.zeros((2, 4)))
TABLE = StepTimeTable(tokens=[1, 6], milliseconds=[1.0, 2.0])

GOOD: dict[str, Any] = {
    "target": TARGET,
    "drafter": DRAFTER,
    "prompts": np.ones((2, 4), np.int32),
    "lengths": np.array([4, 2], np.int32),
    "seeds": np.array([1, 2], np.uint32),
    "max_new_tokens": 5,
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "prompts of one row": ({"prompts": np.ones(4, np.int32)}, "prompts must be"),
    "a length for another batch": ({"lengths": np.array([4])}, "lengths"),
    "float prompts": ({"prompts": np.ones((2, 4))}, "prompts must be integers"),
    "float seeds": ({"seeds": np.array([0.5, 1.0])}, "seeds must be integers"),
    "one seed for all": ({"seeds": np.uint32(3)}, "seeds must be"),
    "an empty prompt": ({"lengths": np.array([4, 0])}, "lengths must lie in 1..4"),
    "a length beyond the padding": ({"lengths": np.array([5, 2])}, "lengths must lie in 1..4"),
    "a token outside of the vocabulary": ({"prompts": np.full((2, 4), 3)}, "token id 3"),
    "a negative token": ({"prompts": np.full((2, 4), -1)}, "token id -1"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens"),
    "more than the window": ({"max_new_tokens": 29}, "context window of 32"),
    "an unknown rule": ({"verification": "hope"}, "verification must be one of rejection, coupled"),
    "no drafts": ({"num_speculative_tokens": 0}, "num_speculative_tokens must lie in 1..2"),
    "more drafts than the block": ({"num_speculative_tokens": 3}, "num_speculative_tokens must lie in 1..2"),
    "drafts without a drafter": ({"drafter": None, "num_speculative_tokens": 2}, "drafter is None"),
    "settings for another batch": ({"sampling": (Sampling(),) * 3}, "sampling must be one"),
    "an unknown admission": ({"admit": "some"}, "admit must be one of all, threshold, early_stop"),
    "a threshold without a head": ({"admit": "threshold"}, "confidence head"),
    "early stop without a head": ({"admit": "early_stop", "step_time": TABLE}, "confidence head"),
    "early stop without a drafter": ({"drafter": None, "admit": "early_stop", "step_time": TABLE}, "confidence head"),
    "early stop without a table": ({"drafter": CONFIDENT, "admit": "early_stop"}, "step_time"),
    "a table that ends before the batch": (
        {
            "drafter": CONFIDENT,
            "admit": "early_stop",
            "step_time": StepTimeTable(tokens=[1], milliseconds=[1.0]),
        },
        "step_time ends at 1 tokens",
    ),
    "a threshold above one": (
        {"drafter": CONFIDENT, "admit": "threshold", "confidence_threshold": 1.5},
        "confidence_threshold",
    ),
}


def call(**changes: Any) -> Any:
    options = {**GOOD, **changes}
    models = [options.pop(name) for name in ("target", "drafter", "prompts", "lengths")]
    return generate(*models, **options)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    "case", ["no tokens", "an unknown rule", "no drafts", "prompts of one row", "one seed for all"]
)
def test_what_is_known_while_tracing_is_refused_there_too(case: str) -> None:
    changes, message = BAD[case]
    options = {**GOOD, **changes}
    arrays = {name: options.pop(name) for name in ("prompts", "lengths", "seeds")}
    target, drafter = options.pop("target"), options.pop("drafter")
    run = functools.partial(generate, **options)
    with pytest.raises(ValueError, match=message):
        jax.jit(run).lower(target, drafter, arrays["prompts"], arrays["lengths"], seeds=arrays["seeds"])


def test_a_request_that_cannot_fit_any_prompt_is_refused_while_tracing() -> None:
    """With traced lengths only what is certain is refused: 32 new tokens leave no place for a prompt of one."""
    run = jax.jit(functools.partial(generate, max_new_tokens=32))
    with pytest.raises(ValueError, match="context window of 32"):
        run.lower(TARGET, DRAFTER, GOOD["prompts"], GOOD["lengths"], seeds=GOOD["seeds"])
