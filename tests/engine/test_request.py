"""What the engine refuses, by the name of the field, and how it reads the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.engine import EngineConfig, Request
from dspark_jax.engine.request import Checked, check


def checked(**changes: Any) -> Checked:
    values: dict[str, Any] = {"prompt_ids": [1, 2, 3], "max_new_tokens": 4, **changes}
    return check(Request(**values), window=10, vocab_size=7, verification="rejection", max_stops=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1] * 10}, "prompt_ids: 10 tokens leave no room .* window of 10"),
        ({"prompt_ids": [1, 7]}, "prompt_ids holds token id 7, outside the vocabulary of 7"),
        ({"prompt_ids": [-1]}, "prompt_ids holds token id -1"),
        ({"prompt_ids": [1.5]}, "prompt_ids must be an integer"),
        ({"prompt_ids": "abc"}, "prompt_ids must be a sequence"),
        ({"prompt_ids": 3}, "prompt_ids must be a sequence"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": None}, "max_new_tokens must be an integer"),
        ({"sampling": {"temperature": 1}}, "sampling must be a Sampling"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": 2**32}, "seed must lie in"),
        ({"seed": "a"}, "seed must be an integer"),
        ({"verification": "exact"}, "verification must be one of rejection, coupled"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids: 3 ids, but this engine holds 2"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
    ],
)
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(**changes)


def test_numpy_integers_are_integers() -> None:
    found = checked(prompt_ids=np.array([1, 2]), max_new_tokens=np.int64(3), seed=np.uint32(5))
    assert found == Checked((1, 2), 3, Sampling(), 5, True, ())


def test_the_limit_is_cut_to_the_window() -> None:
    assert checked(max_new_tokens=100).limit == 7
    assert checked(prompt_ids=[1] * 9, max_new_tokens=100).limit == 1


@pytest.mark.parametrize(
    ("seed", "own", "engine", "coupled"),
    [
        (None, None, "rejection", False),
        (None, None, "coupled", True),
        (3, None, "rejection", True),
        (3, "rejection", "coupled", False),
        (None, "coupled", "rejection", True),
    ],
)
def test_the_rule_is_the_request_s_own_else_coupled_with_a_seed_else_the_engine_s(
    seed: int | None, own: str | None, engine: str, coupled: bool
) -> None:
    request = Request([1], 1, seed=seed, verification=own)
    found = check(request, window=10, vocab_size=None, verification=engine, max_stops=2)
    assert found.coupled is coupled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fast"}, "mode must be one of fixed"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"verification": "x"}, "verification must be one of"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"slot_buckets": (4, 2)}, "slot_buckets must increase"),
        ({"context_buckets": ()}, "context_buckets is empty"),
        ({"slot_buckets": 4}, "slot_buckets must be a sequence of integers, found 4"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"min_gain": None}, "min_gain must be a number, found None"),
        ({"confidence_threshold": "0.5"}, "confidence_threshold must be a number, found '0.5'"),
        ({"profile_temperature": float("nan")}, "profile_temperature must be a finite number >= 0"),
        ({"seed": -1}, "seed must be an integer of at least 0 or None, found -1"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)
