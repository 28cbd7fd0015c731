"""Fields of OpenAI's and vLLM's APIs that this server does not implement, and the values of them that mean
"off".

Clients send many fields at their neutral value (``n=1``, ``tools=null``, ``presence_penalty=0``). Those are
accepted and dropped; any other value is refused by the field's name, because ignoring it would answer a
question the client did not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.serve.errors import bad_request

Neutral = Callable[[Any], bool]


def _one_of(*values: Any) -> Neutral:
    """True for None and for the listed values; False and 0 are told apart, 1 and 1.0 are not."""

    def check(value: Any) -> bool:
        if value is None:
            return True
        return any(isinstance(value, bool) == isinstance(v, bool) and value == v for v in values)

    return check


_null = _one_of()
_off = _one_of(False)
_flag = _one_of(False, True)
_zero = _one_of(0)
_one = _one_of(1)

_SHARED: dict[str, Neutral] = {
    "n": _one,
    "best_of": _one,
    "presence_penalty": _zero,
    "frequency_penalty": _zero,
    "repetition_penalty": _one,
    "length_penalty": _one,
    "logit_bias": _one_of({}),
    "logprobs": _off,
    "prompt_logprobs": _null,
    "echo": _off,
    "min_tokens": _zero,
    "use_beam_search": _off,
    "include_stop_str_in_output": _off,
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _flag,
    "return_tokens_as_token_ids": _off,
    "truncate_prompt_tokens": _null,
    "allowed_token_ids": _null,
    "bad_words": _one_of([]),
    "response_format": _one_of({"type": "text"}),
    "structured_outputs": _null,
    "guided_json": _null,
    "guided_regex": _null,
    "guided_choice": _null,
    "guided_grammar": _null,
    "logits_processors": _null,
    "priority": _zero,
    "service_tier": _one_of("auto", "default"),
    "metadata": _one_of({}),
    "store": _off,
}

CHAT: dict[str, Neutral] = {
    **_SHARED,
    "top_logprobs": _zero,
    "tools": _one_of([]),
    "tool_choice": _one_of("none", "auto"),
    "functions": _one_of([]),
    "function_call": _one_of("none", "auto"),
    "parallel_tool_calls": _flag,
    "modalities": _one_of(["text"]),
    "audio": _null,
    "prediction": _null,
    "reasoning_effort": _one_of("none"),
    "verbosity": _null,
    "web_search_options": _null,
    "documents": _null,
    "chat_template": _null,
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _off,
    "add_special_tokens": _off,
}

COMPLETION: dict[str, Neutral] = {
    **_SHARED,
    "suffix": _one_of(""),
    "add_special_tokens": _one_of(True),
}

# What a client sends back when it repeats an assistant message it once received.
MESSAGE: dict[str, Neutral] = {
    "refusal": _null,
    "annotations": _one_of([]),
    "audio": _null,
    "function_call": _null,
    "tool_calls": _one_of([]),
    "tool_call_id": _null,
    "reasoning": _null,
    "reasoning_content": _null,
}

STREAM_OPTIONS: dict[str, Neutral] = {"continuous_usage_stats": _off, "include_obfuscation": _off}


def drop_neutral(body: Mapping[str, Any], table: Mapping[str, Neutral], prefix: str = "") -> dict[str, Any]:
    """``body`` without the fields of ``table`` that are at a neutral value.

    Raises:
        ApiError: 400 naming the field whose value is not neutral.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        neutral = table.get(name)
        if neutral is None:
            kept[name] = value
        elif not neutral(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise bad_request(
                f"{prefix}{name}={shown} is not supported (only values that mean 'off' are accepted)",
                prefix + name,
                "unsupported_parameter",
            )
    return kept
