"""Between HTTP and the engine: template, tokenise, submit, turn tokens into text, count.

Everything here runs on the event loop, except tokenising (one helper thread, a megabyte of text takes a
while) and the engine itself (``worker.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dspark_jax.serve.detokenize import Detokenizer, StopStrings, detokenizer_factory
from dspark_jax.serve.errors import ApiError, bad_request, engine_failed, not_finite, unavailable
from dspark_jax.serve.metrics import Metrics
from dspark_jax.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from dspark_jax.serve.responses import FinishReason, Usage
from dspark_jax.serve.worker import EngineEvent, EngineWorker, Handle, WorkerDown

T = TypeVar("T")

# Arguments of apply_chat_template that are ours; a client must not reach them through chat_template_kwargs.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    """conversation messages tools documents chat_template add_generation_prompt continue_final_message
    tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask
    tokenizer_kwargs""".split()
)


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What the service knows of the model.

    Attributes:
        name: the name clients use.
        root: where it was loaded from.
        tokenizer: a transformers tokenizer, or None (then only token ids go in, and come out).
        vocab_size: valid token ids are 0 .. vocab_size - 1.
        max_model_len: prompt and answer together, in tokens.
        eos_token_ids: end an answer unless ``ignore_eos``.
        make_request: builds ``dspark_jax.engine.Request`` from its keyword arguments.
        default_template_kwargs: chat_template_kwargs that a request's own override.
    """

    name: str
    root: str
    tokenizer: Any | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    make_request: Callable[..., Any]
    default_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def new_detokenizer(self) -> Callable[[], Detokenizer]:
        """Makes one request's detokenizer."""
        return detokenizer_factory(self.tokenizer)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one event added to one choice."""

    index: int
    text: str
    tokens: list[int]
    finish: FinishReason | None


class Service:
    """Serves requests through a worker. ``model`` is set once the engine is ready."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker
        self.model: ServedModel | None = None
        self.metrics = Metrics()
        self.progress = ""  # the last line of the start-up, shown by /health
        self._pool = ThreadPoolExecutor(1, "dspark-tokenizer")  # one: fast tokenizers cannot be entered twice

    def ready_model(self) -> ServedModel:
        """The model.

        Raises:
            ApiError: 503 while loading, and after the engine died.
        """
        state = self.worker.state
        if state == "ready" and self.model is not None:
            return self.model
        if state == "failed":
            raise unavailable(f"the engine has stopped: {self.worker.error!r}")
        raise unavailable("the server is shutting down" if state == "stopped" else "the model is still loading")

    def close(self) -> None:
        """Ends the helper thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def open(self, request: ChatRequest | CompletionRequest) -> Answer:
        """Checks, tokenises and submits a request; the answer is then on its way.

        Raises:
            ApiError: whatever is wrong with it, or with the engine.
        """
        model = self.ready_model()
        if request.model not in (None, model.name):
            raise ApiError(
                404,
                f"the model {request.model!r} does not exist; this server has {model.name!r}",
                param="model",
                code="model_not_found",
            )
        if isinstance(request, ChatRequest):
            prompts = [await self._in_pool(_chat_prompt, model, request)]
        else:
            prompts = await self._in_pool(_completion_prompts, model, request)
        answer = Answer(self, model, request, prompts)
        try:
            await answer.submit()
        except BaseException:
            answer.close()
            raise
        return answer

    async def _in_pool(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def _chat_prompt(model: ServedModel, request: ChatRequest) -> list[int]:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise bad_request(
            "messages: this model has no tokenizer; use /v1/completions with token ids as the prompt",
            "messages",
        )
    own = request.chat_template_kwargs or {}
    reserved = sorted(_RESERVED_TEMPLATE_KWARGS & own.keys())
    if reserved:
        raise bad_request(
            f"chat_template_kwargs.{reserved[0]}: cannot be set by a request",
            f"chat_template_kwargs.{reserved[0]}",
        )
    messages = [message.for_template() for message in request.messages]
    kwargs = {**model.default_template_kwargs, **own}
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
    except Exception as error:  # noqa: BLE001 a template is a program: it may raise anything about its input
        raise bad_request(f"messages: the chat template refuses them: {error}", "messages") from error
    return _encode(tokenizer, text, "messages", add_special_tokens=False)


def _completion_prompts(model: ServedModel, request: CompletionRequest) -> list[list[int]]:
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise bad_request("prompt: this model has no tokenizer; give token ids", "prompt")
            prompt = _encode(model.tokenizer, prompt, "prompt", add_special_tokens=True)
        else:
            _check_ids(prompt, model.vocab_size, "prompt")
        prompts.append(prompt)
    return prompts


def _encode(tokenizer: Any, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # noqa: BLE001
        raise bad_request(f"{field}: the tokenizer refuses it: {error}", field) from error


def _check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise bad_request(f"{field}: token id {token} at place {i} is not in 0..{vocab_size - 1}", field)


def _prompt_field(request: GenerationRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _room(model: ServedModel, request: GenerationRequest, prompt: Sequence[int]) -> int:
    """Tokens to generate for a prompt: what was asked for, or what the window leaves."""
    field = _prompt_field(request)
    if not prompt:
        raise bad_request(f"{field}: the prompt has no tokens", field)
    left = model.max_model_len - len(prompt)
    if left < 1:
        raise bad_request(
            f"{field}: the prompt has {len(prompt)} tokens, which leaves no room for an answer in the "
            f"context window of {model.max_model_len} tokens",
            field,
            "context_length_exceeded",
        )
    limit = request.limit()
    if limit is not None and limit > left:
        raise bad_request(
            f"{request.limit_name()}={limit} is too large: the context window has {model.max_model_len} "
            f"tokens and the prompt takes {len(prompt)} of them, which leaves {left}",
            request.limit_name(),
            "context_length_exceeded",
        )
    return left if limit is None else limit


class _Choice:
    """Text of one prompt's answer so far."""

    def __init__(self, model: ServedModel, stops: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._detokenizer = model.new_detokenizer()
        self._stops = StopStrings(stops)
        self._stop_ids = stop_ids
        self.handle: Handle | None = None
        self.kept_tokens = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None

    def take(self, event: EngineEvent) -> tuple[str, list[int], FinishReason | None]:
        """New text, tokens kept and finish reason of an event; what follows a stop is dropped."""
        pieces: list[str] = []
        kept: list[int] = []
        for token in event.tokens:
            kept.append(token)
            if token in self._stop_ids:  # ends the answer and is not shown
                self.finish = "stop"
                break
            pieces.append(self._stops.push(self._detokenizer.push(token)))
            if self._stops.hit is not None:
                self.finish = "stop"
                break
        if event.finished and self.finish is None:
            self.finish = "stop" if event.finish_reason == "stop" else "length"
        if self.finish is not None and self._stops.hit is None:
            pieces.append(self._stops.push(self._detokenizer.flush()))
            pieces.append(self._stops.flush())
        self.kept_tokens += len(kept)
        self.cached_tokens = event.cached_tokens
        return "".join(pieces), kept, self.finish


class Answer:
    """An accepted request: one choice a prompt. Iterate ``deltas()``; always ``close()``."""

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        request: GenerationRequest,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        user_stops = tuple(request.stop_token_ids or ())
        _check_ids(user_stops, model.vocab_size, "stop_token_ids")
        stop_ids = user_stops if request.ignore_eos else (*model.eos_token_ids, *user_stops)
        stop_ids = tuple(dict.fromkeys(stop_ids))
        self._service = service
        self._worker = service.worker
        self._engine_requests = [
            model.make_request(
                prompt_ids=prompt,
                max_new_tokens=_room(model, request, prompt),
                sampling=request.sampling(),
                seed=request.engine_seed(),
                verification=request.verification,
                stop_token_ids=stop_ids,
            )
            for prompt in prompts
        ]
        self._choices = [_Choice(model, request.stop, frozenset(stop_ids)) for _ in prompts]
        self._prompt_field, self._limit_field = _prompt_field(request), request.limit_name()
        self._prompt_tokens = sum(len(p) for p in prompts)
        self._queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._metrics: Metrics = service.metrics
        self._opened_at: float | None = None
        self._failed = False
        self._closed = False

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        kept, cached = (sum(getattr(c, name) for c in self._choices) for name in ("kept_tokens", "cached_tokens"))
        return Usage.of(self._prompt_tokens, kept, cached)

    async def submit(self) -> None:
        """Hands every prompt to the engine and waits until it has accepted them."""
        loop = asyncio.get_running_loop()

        def sink(index: int, item: Any) -> None:  # in the worker's thread
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

        try:
            for i, request in enumerate(self._engine_requests):
                self._choices[i].handle = self._worker.submit(request, functools.partial(sink, i))
            for choice in self._choices:
                assert choice.handle is not None
                await asyncio.wrap_future(choice.handle.accepted)
        except WorkerDown as error:
            raise unavailable(f"the engine takes no requests: {error}") from error
        except ValueError as error:
            raise bad_request(str(error), self._field(str(error))) from error
        except Exception as error:
            raise engine_failed(error) from error
        self._opened_at = time.monotonic()
        self._metrics.active += len(self._choices)
        self._metrics.prompt_tokens += self._prompt_tokens

    def _field(self, message: str) -> str | None:
        """The request's field that the engine complains about: its messages begin with its own name of it."""
        word = message.split(maxsplit=1)[0].rstrip(":,")
        return {"prompt_ids": self._prompt_field, "max_new_tokens": self._limit_field}.get(
            word, word if word in ("sampling", "seed", "verification", "stop_token_ids") else None
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """New text as it comes, until every choice has finished.

        Raises:
            ApiError: the engine failed on the request.
        """
        first = True
        unfinished = len(self._choices)
        while unfinished:
            index, item = await self._queue.get()
            choice = self._choices[index]
            if choice.finish is not None:
                continue  # what the engine made before it heard of the stop string
            if isinstance(item, WorkerDown):
                self._failed = True
                raise unavailable(str(item))
            if isinstance(item, BaseException):
                self._failed = True
                raise engine_failed(item) from item
            if item.finish_reason == "error":
                self._failed = True
                raise not_finite(choice.kept_tokens + len(item.tokens))
            if first and item.tokens and self._opened_at is not None:
                self._metrics.first_token_s.add(time.monotonic() - self._opened_at)
                first = False
            text, tokens, finish = choice.take(item)
            if finish is not None:
                unfinished -= 1
                if not item.finished and choice.handle is not None:
                    self._worker.cancel(choice.handle)
            yield Delta(index, text, tokens, finish)

    async def whole(self) -> list[tuple[str, list[int], FinishReason]]:
        """Text, tokens and finish reason of every choice, once all have finished."""
        texts: list[list[str]] = [[] for _ in self._choices]
        tokens: list[list[int]] = [[] for _ in self._choices]
        async for delta in self.deltas():
            texts[delta.index].append(delta.text)
            tokens[delta.index] += delta.tokens
        return [("".join(t), k, c.finish or "length") for t, k, c in zip(texts, tokens, self._choices, strict=True)]

    def close(self) -> None:
        """Frees what has not finished. Safe to call at any time, and twice."""
        if self._closed:
            return
        self._closed = True
        for choice in self._choices:
            if choice.handle is not None and choice.finish is None:
                self._worker.cancel(choice.handle)
        if self._opened_at is None:
            return
        metrics = self._metrics
        metrics.active -= len(self._choices)
        metrics.generated_tokens += sum(c.kept_tokens for c in self._choices)
        metrics.request_s.add(time.monotonic() - self._opened_at)
        for choice in self._choices:
            metrics.finished[choice.finish or ("error" if self._failed else "cancelled")] += 1
