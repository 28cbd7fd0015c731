"""The server behind a real socket: the official client, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from dspark_jax.serve import __main__ as server

ANSWER = "naïve café €5 😀 the cat"
CHAT: Any = [{"role": "user", "content": "hello"}]


def test_the_official_client_works_unmodified(serving: Callable[..., Any], live: Any, tokenizer: Any) -> None:
    s = serving(ANSWER + "<|im_end|>", api_key="secret")
    with live(s.app) as url, openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        answer = client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0.7, top_p=0.9, max_tokens=100, seed=3, stop=["zzz"], n=1
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == len(tokenizer.encode(ANSWER)) + 1
        again: Any = [*CHAT, answer.choices[0].message, *CHAT]  # the client's own object goes back
        assert client.chat.completions.create(model="tiny", messages=again).choices[0].message.role == "assistant"
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=CHAT,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"mood": "glad"}},
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens == answer.usage.completion_tokens
        text = client.completions.create(model="tiny", prompt="hello", max_tokens=100)
        assert text.choices[0].text == ANSWER
        parts = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=100, stream=True)
        assert "".join(p.choices[0].text for p in parts) == ANSWER


def test_the_official_client_sees_our_errors_as_its_own(serving: Callable[..., Any], live: Any) -> None:
    s = serving("fine", api_key="secret")
    with live(s.app) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        with openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="tiny", messages=CHAT, temperature=-1)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as missing:
                client.chat.completions.create(model="other", messages=CHAT)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError, match="presence_penalty"):
                client.chat.completions.create(model="tiny", messages=CHAT, presence_penalty=1.0)


def test_a_stream_arrives_while_it_is_made_and_a_client_that_leaves_frees_its_slot(
    serving: Callable[..., Any], live: Any, until: Any
) -> None:
    s = serving("and on " * 60, block=1, step_s=0.005)
    body = {"prompt": "x", "stream": True}
    with live(s.app) as url, httpx.Client() as client:
        with client.stream("POST", url + "/v1/completions", json=body) as response:
            line = next(response.iter_lines())
            assert json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is None
            assert s.engine.cancelled == []
        until(lambda: s.engine.cancelled == [0])
        until(lambda: s.service.metrics.finished["cancelled"] == 1)
    assert s.engine.steps < 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_the_answer_cancels_it(
    serving: Callable[..., Any], live: Any, until: Any, stream: bool
) -> None:
    """One request runs, one waits in the engine's queue; both clients leave."""
    s = serving("and on " * 60, block=1, step_s=0.01, slots=1)
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with live(s.app) as url:
        port = int(url.rsplit(":", 1)[1])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for client in clients:
            client.sendall(head + body)
        until(lambda: len(s.engine.submitted) == 2)
        for client in clients:
            client.close()
        until(lambda: sorted(s.engine.cancelled) == [0, 1])
        until(lambda: s.service.metrics.active == 0)
    assert s.engine.steps < 100


def test_a_client_that_hangs_up_within_its_body_does_no_harm(serving: Callable[..., Any], live: Any) -> None:
    s = serving("fine")
    with live(s.app) as url:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
    assert len(s.engine.submitted) == 1


def test_a_body_above_the_limit_gets_its_answer_through_a_socket(serving: Callable[..., Any], live: Any) -> None:
    s = serving("fine")
    with live(s.app) as url:
        for size in (2 << 20, 8 << 20):
            response = httpx.post(url + "/v1/completions", json={"prompt": "x" * size})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert httpx.get(url + "/health").status_code == 200


def test_streams_and_whole_answers_of_many_clients_do_not_mix(serving: Callable[..., Any], live: Any) -> None:
    s = serving(lambda r: list(r.prompt_ids) * 3, slots=3, block=2)

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        if i % 2:
            return (await client.completions.create(model="tiny", prompt=f"number {i}")).choices[0].text
        stream = await client.completions.create(model="tiny", prompt=f"number {i}", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client, i) for i in range(24))))

    with live(s.app) as url:
        assert asyncio.run(run(url)) == [f"number {i}" * 3 for i in range(24)]


def test_answers_that_outlast_a_shutdown_end_with_an_error_of_ours(
    serving: Callable[..., Any], until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_FINISH_ANSWERS_S", 0.1)
    s = serving("and on " * 60, block=1, step_s=0.05)
    listener = server.bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
    running = server._Server(uvicorn.Config(s.app, lifespan="off", log_level="error"), s.worker)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    with listener, httpx.Client() as client:
        with client.stream("POST", url, json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            running.should_exit = True
            assert [line for line in lines if line][-2:] == [
                'data: {"error": {"message": "the server is shutting down", "type": "server_error", '
                '"param": null, "code": "service_unavailable"}}',
                "data: [DONE]",
            ]
        thread.join(5)
        assert not thread.is_alive() and s.worker.state == "stopped"
