"""Response and chunk objects of the two endpoints, as OpenAI spells them."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class _Object(BaseModel):
    def encode(self) -> str:
        """JSON of the fields that were set.

        ASCII only: some clients split event streams at every character that Unicode calls a line end.
        """
        return json.dumps(self.model_dump(exclude_unset=True), separators=(",", ":"))


class PromptTokensDetails(BaseModel):
    """``cached_tokens``: prompt tokens that had been computed before and were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts: ``completion_tokens`` are the tokens kept, a stop token and the token that completed a
    stop string included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """Usage with its sum."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class AssistantMessage(BaseModel):
    """The answer of a chat, or a piece of it (``delta``)."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """``message`` in a whole answer, ``delta`` in a chunk."""

    index: int
    message: AssistantMessage | None = None
    delta: AssistantMessage | None = None
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """Text of one prompt's continuation, or the next piece of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class Completion(_Object):
    """``chat.completion``, ``chat.completion.chunk`` or ``text_completion``."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """One entry of ``/v1/models``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dspark_jax"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Any] = Field(default_factory=list)


class ResponseWriter:
    """Builds the objects of one answer: same id, time and model in all of them.

    Args:
        chat: the endpoint's kind.
        model: served name.
        token_ids: choices carry the ids of their tokens.
        usage_field: chunks carry ``usage: null``, as OpenAI does where the client asked for usage.
    """

    def __init__(self, *, chat: bool, model: str, token_ids: bool = False, usage_field: bool = False) -> None:
        self.chat = chat
        self.token_ids = token_ids
        self._usage_field = usage_field
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._common: dict[str, Any] = {
            "id": prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def role(self, index: int) -> str:
        """The first chunk of a chat choice."""
        return self._chunk([self._choice(index, "", [], None, chunk=True, role=True)])

    def piece(self, index: int, text: str, tokens: list[int], finish: FinishReason | None) -> str:
        """A chunk with the next piece of text."""
        return self._chunk([self._choice(index, text, tokens, finish, chunk=True)])

    def usage(self, usage: Usage) -> str:
        """The last chunk: no choices."""
        return self._object(True, choices=[], usage=usage)

    def whole(self, choices: list[tuple[str, list[int], FinishReason]], usage: Usage) -> str:
        """The whole answer: text, tokens and finish reason of every choice."""
        built = [self._choice(i, *choice, chunk=False, role=True) for i, choice in enumerate(choices)]
        return self._object(False, choices=built, usage=usage)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[int],
        finish: FinishReason | None,
        *,
        chunk: bool,
        role: bool = False,
    ) -> ChatChoice | CompletionChoice:
        fields: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if self.token_ids:
            fields["token_ids"] = tokens
        if not self.chat:
            return CompletionChoice(text=text, **fields)
        message: dict[str, Any] = {"role": "assistant"} if role else {}
        if text or role:
            message["content"] = text
        fields["delta" if chunk else "message"] = AssistantMessage(**message)
        return ChatChoice(**fields)

    def _chunk(self, choices: list[ChatChoice | CompletionChoice]) -> str:
        usage = {"usage": None} if self._usage_field else {}
        return self._object(True, choices=choices, **usage)

    def _object(self, chunk: bool, **fields: Any) -> str:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return Completion(object=kind, **self._common, **fields).encode()
