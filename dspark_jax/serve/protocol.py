"""Requests of ``/v1/chat/completions`` and ``/v1/completions``: parsed strictly, refused by field name.

Defaults that are ours to choose: ``temperature`` is 1.0 as in OpenAI's API (a model's generation_config is
not consulted), ``max_tokens`` is whatever is left of the context window, on both endpoints.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dspark_jax.config import Sampling
from dspark_jax.serve import neutral
from dspark_jax.serve.errors import ApiError, bad_request

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64


def _text(value: Any) -> Any:
    """Refuses strings with lone surrogates (JSON can spell them; no tokenizer can read them)."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode: lone surrogate at character {error.start}") from None
    return value


def _content(value: Any) -> Any:
    """A message's content: a string, or a list of text parts, which are joined by newlines."""
    if not isinstance(value, list):
        return _text(value)
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"part {i} has type {kind!r}; only text parts are supported")
        if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise ValueError(f"part {i} must have exactly the fields 'type' and 'text' (a string)")
        texts.append(_text(part["text"]))
    if not texts:
        raise ValueError("the list of parts is empty")
    return "\n".join(texts)


def _stops(value: Any) -> Any:
    """``stop``: null, one string, or a list of strings."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, found {len(stops)}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, found {len(stop)}")
        _text(stop)
    return stops


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int for x in value)


def _prompts(value: Any) -> Any:
    """``prompt`` as a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str) or (_is_ids(value) and value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(p, str) or _is_ids(p) for p in value):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value or not all(value):
        raise ValueError("is empty")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in a request, found {len(value)}")
    return [_text(p) for p in value]


Text = Annotated[str, BeforeValidator(_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage``: one more chunk at the end, without choices, carries the usage."""

    include_usage: bool | None = None


class Message(_Strict):
    """One turn of a chat. ``developer`` is OpenAI's newer name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class GenerationRequest(_Strict):
    """What both endpoints share. ``top_k``, ``min_p``, ``stop_token_ids``, ``ignore_eos`` and
    ``return_token_ids`` are vLLM's extensions; ``verification`` ("rejection" or "coupled") is ours."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    verification: Literal["rejection", "coupled"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Labels for the provider's own use: they change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream=true")
        return self

    def sampling(self) -> Sampling:
        """The sampling parameters, defaults filled in."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),  # vLLM spells "off" as -1 or 0
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
        )

    def limit(self) -> int | None:
        """The most tokens to generate; None means the rest of the window."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def limit_name(self) -> str:
        """The field that ``limit`` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def engine_seed(self) -> int | None:
        """The seed as uint32, see ``fold_seed``."""
        return None if self.seed is None else fold_seed(self.seed)

    def include_usage(self) -> bool:
        """True if a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``. ``prompt`` is normalised to a list of prompts."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]


def fold_seed(seed: int) -> int:
    """A client's 64-bit seed as the engine's uint32.

    0..2^32-1 stay what they are; any other 64-bit integer (negative ones in two's complement) is hashed to
    32 bits by the finaliser of splitmix64, so that it is as reproducible as a small one.
    """
    if 0 <= seed < 2**32:
        return seed
    mask = 2**64 - 1
    x = seed & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) & 0xFFFFFFFF


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(kind: type[RequestT], body: Any) -> RequestT:
    """Validates a decoded JSON body.

    Raises:
        ApiError: 400 naming the first field at fault; the message lists all of them.
    """
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, found {type(body).__name__}")
    chat = issubclass(kind, ChatRequest)
    body = neutral.drop_neutral(body, neutral.CHAT if chat else neutral.COMPLETION)
    if isinstance(body.get("stream_options"), dict):
        body["stream_options"] = neutral.drop_neutral(body["stream_options"], neutral.STREAM_OPTIONS, "stream_options.")
    if chat and isinstance(body.get("messages"), list):
        body["messages"] = [
            neutral.drop_neutral(m, neutral.MESSAGE, f"messages[{i}].") if isinstance(m, dict) else m
            for i, m in enumerate(body["messages"])
        ]
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    problems: list[tuple[str, str]] = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        name = _field_name(item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown field"
        if not name:  # a check across fields starts its message with the field's name
            name, _, message = message.partition(": ")
        problems.append((name, message))
    shown = "; ".join(f"{name}: {message}" for name, message in problems[:8])
    if len(problems) > 8:
        shown += f"; and {len(problems) - 8} more"
    return bad_request(shown, problems[0][0])


def _field_name(loc: tuple[int | str, ...]) -> str:
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
