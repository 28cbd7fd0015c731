"""A scripted engine, a tiny byte-level tokenizer and ways to run the server on them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark_jax.config import Sampling
from dspark_jax.serve.app import create_app
from dspark_jax.serve.service import ServedModel, Service
from dspark_jax.serve.worker import EngineWorker

CHAT_TEMPLATE = (
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('not this one') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}) {% endif %}{% endif %}"
)
CORPUS = [
    "hello world, this is a little text about tokens",
    "the cat sat on the mat: STOP here",
    "naïve café €5 😀",
]


@dataclasses.dataclass(frozen=True)
class FakeRequest:
    """The fields of ``dspark_jax.engine.Request``."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int | None = None
    verification: str | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass
class FakeEvent:
    """The fields of ``dspark_jax.engine.Event``."""

    id: int
    tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    committed: list[int] = dataclasses.field(default_factory=list)
    offered: list[int] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0


NOT_FINITE = -1
"""In place of a token of a script: its logits are not finite."""


class FakeEngine:
    """Answers what ``script(request)`` says, ``block`` tokens a step, a few requests at a time.

    Like the real one it belongs to one thread, which it checks, and stops at stop tokens, at the limit, and with
    ``error`` where the script says ``NOT_FINITE``.
    """

    def __init__(
        self,
        script: Callable[[FakeRequest], Sequence[int]],
        *,
        block: int = 3,
        slots: int = 2,
        step_s: float = 0.0,
        before_step: Callable[[FakeEngine], None] = lambda engine: None,
    ) -> None:
        self.script, self.block, self.slots, self.step_s = script, block, slots, step_s
        self.before_step = before_step
        self.submitted: list[FakeRequest] = []
        self.cancelled: list[int] = []
        self.steps = self.resets = 0
        self.cached_tokens = 0  # of every request
        self._waiting: deque[int] = deque()
        self._running: dict[int, deque[int]] = {}
        self._thread: int | None = None

    def _check_thread(self) -> None:
        me = threading.get_ident()
        assert self._thread in (None, me), "the engine was entered from two threads"
        self._thread = me

    def submit(self, request: FakeRequest) -> int:
        self._check_thread()
        if 7 in request.prompt_ids[:1]:
            raise ValueError("prompt_ids: this engine does not like prompts that begin with 7")
        self.submitted.append(request)
        self._waiting.append(len(self.submitted) - 1)
        return len(self.submitted) - 1

    def cancel(self, request_id: int) -> None:
        self._check_thread()
        self.cancelled.append(request_id)
        self._running.pop(request_id, None)
        with contextlib.suppress(ValueError):
            self._waiting.remove(request_id)

    def reset(self) -> None:
        self._check_thread()
        self.resets += 1
        self._waiting.clear()
        self._running.clear()

    def has_work(self) -> bool:
        self._check_thread()
        return bool(self._waiting or self._running)

    def step(self) -> list[FakeEvent]:
        self._check_thread()
        self.steps += 1
        self.before_step(self)
        time.sleep(self.step_s)
        while self._waiting and len(self._running) < self.slots:
            i = self._waiting.popleft()
            request = self.submitted[i]
            self._running[i] = deque(list(self.script(request))[: request.max_new_tokens])
        events = [self._advance(i) for i in list(self._running)]
        return [dataclasses.replace(event, cached_tokens=self.cached_tokens) for event in events]

    def _advance(self, i: int) -> FakeEvent:
        left = self._running[i]
        tokens: list[int] = []
        while left and len(tokens) < self.block:
            tokens.append(left.popleft())
            if tokens[-1] == NOT_FINITE:
                del self._running[i]
                return FakeEvent(i, tokens[:-1], True, "error", [len(tokens)], [self.block - 1])
            if tokens[-1] in self.submitted[i].stop_token_ids:
                del self._running[i]
                return FakeEvent(i, tokens, True, "stop", [len(tokens)], [self.block - 1])
        if left:
            return FakeEvent(i, tokens, False, None, [len(tokens)], [self.block - 1])
        del self._running[i]
        return FakeEvent(i, tokens, True, "length", [len(tokens)], [self.block - 1])

    def counters(self) -> dict[str, Any]:
        self._check_thread()
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "accepted": 3 * self.steps,
            "offered": 5 * self.steps,
            "verify_tokens_bucket": {4: self.steps},
            "prefix_cache_hits": self.cached_tokens,
            "mode": "fixed",
        }


class Serving:
    """A service on a fake engine, with the application around it."""

    def __init__(self, engine: FakeEngine, tokenizer: Any, *, api_key: str | None = None, **model: Any) -> None:
        self.engine = engine
        self.worker = EngineWorker(lambda: engine)
        self.service = Service(self.worker)
        eos = () if tokenizer is None else (tokenizer.eos_token_id,)
        fields = {
            "name": "tiny",
            "root": "tiny",
            "tokenizer": tokenizer,
            "vocab_size": 400 if tokenizer is None else len(tokenizer),
            "max_model_len": 256,
            "eos_token_ids": eos,
            "make_request": FakeRequest,
        }
        self.service.model = ServedModel(**{**fields, **model})
        self.app = create_app(self.service, api_key=api_key, version="1.2.3")

    def start(self) -> Serving:
        """Starts the worker and waits until it is ready."""
        self.worker.start()
        wait_for(lambda: self.worker.state != "starting")
        return self

    def stop(self) -> None:
        """Ends the worker."""
        assert self.worker.stop(5.0)
        self.service.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Polls until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


@contextlib.contextmanager
def live_server(app: FastAPI) -> Iterator[str]:
    """The application under uvicorn on a free port of localhost; yields its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, ChatML specials and one added token that is not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken("<say it>", special=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def serving(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Serving]]:
    """``serving(script, model={...}, api_key=..., **engine options)`` starts a service for one test."""
    made: list[Serving] = []

    def make(
        script: Callable[[FakeRequest], Sequence[int]] | str,
        *,
        model: dict[str, Any] | None = None,
        api_key: str | None = None,
        tokenizer: Any = tokenizer,
        **options: Any,
    ) -> Serving:
        if isinstance(script, str):
            tokens = tokenizer.encode(script)
            engine = FakeEngine(lambda request: tokens, **options)
        else:
            engine = FakeEngine(script, **options)
        made.append(Serving(engine, tokenizer, api_key=api_key, **(model or {})).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def live() -> Callable[[FastAPI], contextlib.AbstractContextManager[str]]:
    """``with live(app) as url``: the application under uvicorn."""
    return live_server


@pytest.fixture
def until() -> Callable[..., None]:
    """``until(condition, timeout_s=5)``: polls."""
    return wait_for
