"""Requests are refused by the name of the field, and neutral values of fields we lack are accepted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dspark_jax.config import Sampling
from dspark_jax.serve.errors import ApiError
from dspark_jax.serve.protocol import ChatRequest, CompletionRequest, fold_seed, parse_request

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def refused(kind: type, body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, body)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_completion_tokens", -3),
        ("stop", ""),
        ("stop", ["a", 3]),
        ("stop", ["x"] * 17),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("seed", 1.5),
        ("seed", 2**64),
        ("verification", "maybe"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),  # without stream
        ("user", 5),
        ("model", 5),
        # known, but not here
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("logprobs", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.2),
        ("logit_bias", {"50": 1}),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
        ("min_tokens", 3),
        ("guided_json", {}),
        ("skip_special_tokens", False),
        # unknown
        ("temprature", 1.0),
        ("mystery", None),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_bad_field_is_refused_by_its_name(kind: type, field: str, value: Any) -> None:
    base = CHAT if kind is ChatRequest else TEXT
    error = refused(kind, {**base, field: value})
    assert error.param is not None and error.param.split("[")[0] == field
    assert field in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({**CHAT, "tools": [{}]}, "tools"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ({**CHAT, "prompt": "x"}, "prompt"),
        ({**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({**CHAT, "chat_template": "{{ x }}"}, "chat_template"),
        ({**CHAT, "stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        (
            {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_a_bad_chat_is_refused_by_the_place_of_the_fault(body: Any, param: str) -> None:
    error = refused(ChatRequest, body)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], ["a", 3], [1, True], [[1], "a", 2], 5, None, {"a": 1}])
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    assert refused(CompletionRequest, {"prompt": prompt}).param == "prompt"


def test_a_missing_prompt_is_refused() -> None:
    assert refused(CompletionRequest, {}).param == "prompt"


@pytest.mark.parametrize("body", [[], "x", None, 3])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    assert "JSON object" in refused(ChatRequest, body).message


def test_several_faults_are_listed_together() -> None:
    error = refused(ChatRequest, {**CHAT, "temperature": -1, "top_p": 3, "zzz": 1})
    assert all(name in error.message for name in ("temperature", "top_p", "zzz: unknown field"))


def test_neutral_values_of_fields_we_lack_are_accepted() -> None:
    request = parse_request(
        ChatRequest,
        {
            **CHAT,
            "n": 1,
            "logprobs": False,
            "top_logprobs": None,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "tools": None,
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "logit_bias": {},
            "service_tier": "auto",
            "store": False,
            "temperature": None,
            "stop": None,
            "user": "someone",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        },
    )
    assert request.include_usage()


def test_an_assistant_message_can_be_sent_back_as_it_came() -> None:
    """The openai client dumps its messages with every optional field at null."""
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    request = parse_request(ChatRequest, {"messages": [*CHAT["messages"], message]})
    assert [m.for_template() for m in request.messages][1] == {"role": "assistant", "content": "x"}


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_request(ChatRequest, {"messages": [{"role": "developer", "content": parts, "name": "n"}]})
    assert request.messages[0].for_template() == {"role": "system", "content": "a\nb", "name": "n"}


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[1], "a"], [[1], "a"]),
    ],
)
def test_every_spelling_of_prompts_becomes_a_list(prompt: Any, want: list[Any]) -> None:
    assert parse_request(CompletionRequest, {"prompt": prompt}).prompt == want


def test_defaults_are_those_of_the_openai_api() -> None:
    request = parse_request(ChatRequest, CHAT)
    assert request.sampling() == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert request.limit() is None
    assert request.engine_seed() is None
    assert request.stop == []


def test_max_completion_tokens_wins_over_its_old_name_and_top_k_minus_one_means_off() -> None:
    request = parse_request(ChatRequest, {**CHAT, "max_tokens": 5, "max_completion_tokens": 7, "top_k": -1})
    assert (request.limit(), request.limit_name()) == (7, "max_completion_tokens")
    assert request.sampling().top_k == 0


def test_uint32_seeds_are_kept_and_other_64_bit_seeds_are_folded_into_them() -> None:
    assert [fold_seed(s) for s in (0, 42, 2**32 - 1)] == [0, 42, 2**32 - 1]
    big = [-1, -(2**63), 2**32, 2**63, 2**64 - 1]
    folded = [fold_seed(s) for s in big]
    assert all(0 <= f < 2**32 for f in folded)
    assert fold_seed(-1) == fold_seed(2**64 - 1)  # the same 64 bits
    assert len({fold_seed(2**32 + i) for i in range(1000)}) == 1000
