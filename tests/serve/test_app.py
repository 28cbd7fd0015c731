"""The endpoints on a scripted engine, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serve.conftest import NOT_FINITE

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ANSWER = "naïve café €5 😀 the cat"


def ask(app: Any, *calls: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    """Sends (method, path, httpx options) at the same time; the responses in order."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client:
            return list(await asyncio.gather(*(client.request(m, p, **o) for m, p, o in calls)))

    return asyncio.run(run())


def post(app: Any, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return ask(app, ("POST", path, {"json": body, **options}))[0]


def chat(app: Any, **fields: Any) -> httpx.Response:
    return post(app, "/v1/chat/completions", {**CHAT, **fields})


def complete(app: Any, **fields: Any) -> httpx.Response:
    return post(app, "/v1/completions", fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Chunks of an event stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(response: httpx.Response, index: int = 0) -> tuple[str, str | None]:
    """Joined text and finish reason of one choice of a stream."""
    choices = [c for e in events(response) for c in e["choices"] if c["index"] == index]
    text = "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    assert len(reasons) == 1 and choices[-1]["finish_reason"] == reasons[0]
    return text, reasons[0]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- answers ---------------------------------------------------------------------------------------


def test_a_chat_answer_has_the_openai_shape(serving: Callable[..., Any], tokenizer: Any) -> None:
    s = serving(ANSWER + "<|im_end|>" + "never shown")
    body = chat(s.app, model="tiny", temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7).json()
    prompt = tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    kept = len(tokenizer.encode(ANSWER)) + 1
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": kept,
        "total_tokens": len(prompt) + kept,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    request = s.engine.submitted[0]
    assert request.prompt_ids == prompt
    assert request.seed == 7 and request.verification is None
    assert request.max_new_tokens == 256 - len(prompt)
    assert request.stop_token_ids == (tokenizer.eos_token_id,)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)


@pytest.mark.parametrize("block", [1, 3, 8, 100])
@pytest.mark.parametrize(
    ("stop", "max_tokens", "want"),
    [
        (None, None, (ANSWER, "stop")),
        (["café"], None, ("naïve ", "stop")),
        ("fé €", None, ("naïve ca", "stop")),
        ("😀", None, ("naïve café €5 ", "stop")),
        (["zzz", "ve c"], None, ("naï", "stop")),
        ("cat!", None, (ANSWER, "stop")),  # held back, then shown
        (None, 3, None),  # cut in the middle of the answer
    ],
)
def test_streaming_equals_not_streaming_whatever_the_block(
    serving: Callable[..., Any], block: int, stop: Any, max_tokens: int | None, want: tuple[str, str] | None
) -> None:
    s = serving(ANSWER + "<|im_end|>", block=block)
    fields = {"stop": stop, "max_tokens": max_tokens}
    whole = chat(s.app, **fields).json()
    got = (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"])
    if want is not None:
        assert got == want
    else:
        assert got[1] == "length" and whole["usage"]["completion_tokens"] == max_tokens
    stream = chat(s.app, stream=True, stream_options={"include_usage": True}, **fields)
    assert streamed(stream) == got
    assert events(stream)[-1]["usage"] == whole["usage"] and events(stream)[-1]["choices"] == []
    assert events(stream)[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = complete(s.app, prompt="hello", **fields).json()
    assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == got
    assert streamed(complete(s.app, prompt="hello", stream=True, **fields)) == got


@pytest.mark.parametrize("block", [1, 2, 4, 50])
def test_usage_at_a_stop_string_counts_up_to_the_token_that_completed_it(
    serving: Callable[..., Any], until: Any, tokenizer: Any, block: int
) -> None:
    s = serving("one two STOP three four five", block=block)
    usage = chat(s.app, stop="STOP").json()["usage"]
    assert usage["completion_tokens"] == len(tokenizer.encode("one two STOP"))
    until(lambda: not s.service.worker._live)


def test_a_stop_string_cancels_the_request_in_the_engine(serving: Callable[..., Any], until: Any) -> None:
    s = serving("one STOP " + "and on " * 100, block=2, step_s=0.002)
    assert chat(s.app, stop=["STOP"], max_tokens=200).json()["choices"][0]["finish_reason"] == "stop"
    until(lambda: s.engine.cancelled == [0])


def test_a_stream_never_shows_half_a_character(serving: Callable[..., Any]) -> None:
    s = serving("😀😁é" * 5, block=1)
    stream = complete(s.app, prompt="x", stream=True)
    assert "\\ufffd" not in stream.text
    assert streamed(stream)[0] == "😀😁é" * 5


def test_several_prompts_are_answered_in_their_order(serving: Callable[..., Any], tokenizer: Any) -> None:
    s = serving(lambda r: list(r.prompt_ids) * 2, slots=1)
    prompts = ["abc", "hello", "the cat"]
    body = complete(s.app, prompt=prompts, max_tokens=100).json()
    assert [c["text"] for c in body["choices"]] == [p * 2 for p in prompts]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    stream = complete(s.app, prompt=prompts, stream=True)
    assert [streamed(stream, i)[0] for i in range(3)] == [p * 2 for p in prompts]
    ids = [tokenizer.encode(p) for p in prompts]
    assert [c["text"] for c in complete(s.app, prompt=ids).json()["choices"]] == [p * 2 for p in prompts]


def test_many_requests_at_once_get_their_own_answers(serving: Callable[..., Any]) -> None:
    s = serving(lambda r: list(r.prompt_ids) * 3, slots=3, block=2)
    bodies = [(f"number {i}", i % 2 == 0) for i in range(20)]
    calls = [("POST", "/v1/completions", {"json": {"prompt": p, "stream": stream}}) for p, stream in bodies]
    for (prompt, stream), response in zip(bodies, ask(s.app, *calls), strict=True):
        got = streamed(response)[0] if stream else response.json()["choices"][0]["text"]
        assert got == prompt * 3
    assert s.service.metrics.active == 0


def test_token_ids_are_returned_on_demand_and_always_without_a_tokenizer(serving: Callable[..., Any]) -> None:
    s = serving(lambda r: [5, 6, 9, 5], tokenizer=None, model={"eos_token_ids": (9,)})
    choice = complete(s.app, prompt=[1, 2]).json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": [5, 6, 9],
    }
    chunks = events(complete(s.app, prompt=[1, 2], stream=True))
    assert [t for e in chunks for c in e["choices"] for t in c["token_ids"]] == [5, 6, 9]
    assert error_of(chat(s.app), 400)["param"] == "messages"
    assert error_of(complete(s.app, prompt="text"), 400)["param"] == "prompt"


def test_ignore_eos_leaves_only_the_clients_stop_tokens(serving: Callable[..., Any], tokenizer: Any) -> None:
    s = serving("ab<|im_end|>cd")
    c = tokenizer.encode("c")[0]
    assert complete(s.app, prompt="x", ignore_eos=True).json()["choices"][0]["text"] == "abcd"
    assert complete(s.app, prompt="x", ignore_eos=True, stop_token_ids=[c]).json()["choices"][0]["text"] == "ab"
    assert complete(s.app, prompt="x", stop_token_ids=[c]).json()["choices"][0]["text"] == "ab"
    assert [r.stop_token_ids for r in s.engine.submitted] == [(), (c,), (tokenizer.eos_token_id, c)]


def test_seed_and_rule_reach_the_engine(serving: Callable[..., Any]) -> None:
    s = serving("x")
    complete(s.app, prompt="x", seed=-1, verification="rejection", temperature=0)
    assert s.engine.submitted[0].seed not in (None, -1)
    assert s.engine.submitted[0].verification == "rejection"
    assert s.engine.submitted[0].sampling.temperature == 0.0


def test_chat_template_kwargs_reach_the_template_and_override_the_servers(
    serving: Callable[..., Any], tokenizer: Any
) -> None:
    s = serving("x", model={"default_template_kwargs": {"mood": "calm"}})
    chat(s.app)
    chat(s.app, chat_template_kwargs={"mood": "glad"})
    prompts = [tokenizer.decode(r.prompt_ids) for r in s.engine.submitted]
    assert [p.rsplit("\n", 1)[1] for p in prompts] == ["(calm) ", "(glad) "]
    error = error_of(chat(s.app, chat_template_kwargs={"chat_template": "{{ 1 }}"}), 400)
    assert error["param"] == "chat_template_kwargs.chat_template"


# -- refusals --------------------------------------------------------------------------------------


def test_the_server_refuses_and_lives_on(serving: Callable[..., Any]) -> None:
    s = serving("fine")
    path = "/v1/chat/completions"
    assert error_of(chat(s.app, temperature=-1), 400)["param"] == "temperature"
    raw = {"content": b'{"messages": [', "headers": {"content-type": "application/json"}}
    assert error_of(ask(s.app, ("POST", path, raw))[0], 400)["code"] == "invalid_json"
    for content in (b"", b"\xff\xfe{", b"[" * 100_000, b"1" * 10_000):
        assert error_of(ask(s.app, ("POST", path, {"content": content}))[0], 400)["param"] in ("body", None)
    nan = json.dumps({**CHAT, "temperature": float("nan")}).encode()
    assert error_of(ask(s.app, ("POST", path, {"content": nan}))[0], 400)["param"] == "temperature"
    assert error_of(chat(s.app, model="other"), 404)["code"] == "model_not_found"
    assert error_of(chat(s.app, messages=[]), 400)["param"] == "messages"
    assert error_of(chat(s.app, messages=[{"role": "user", "content": "refuse me"}]), 400)["param"] == "messages"
    assert error_of(complete(s.app, prompt=""), 400)["param"] == "prompt"
    assert error_of(complete(s.app, prompt=[99999]), 400)["param"] == "prompt"
    assert error_of(complete(s.app, prompt="x", stop_token_ids=[99999]), 400)["param"] == "stop_token_ids"
    too_long = error_of(complete(s.app, prompt="ab " * 400), 400)
    assert (too_long["param"], too_long["code"]) == ("prompt", "context_length_exceeded")
    greedy = error_of(complete(s.app, prompt="ab", max_tokens=10_000), 400)
    assert (greedy["param"], greedy["code"]) == ("max_tokens", "context_length_exceeded")
    by_engine = error_of(complete(s.app, prompt=[7]), 400)
    assert "begin with 7" in by_engine["message"] and by_engine["param"] == "prompt"
    assert "begin with 7" in error_of(complete(s.app, prompt=[[8], [7]], stream=True), 400)["message"]
    assert error_of(ask(s.app, ("GET", path, {}))[0], 405)["code"] == "method_not_allowed"
    assert error_of(ask(s.app, ("GET", "/nothing", {}))[0], 404)["code"] == "not_found"
    assert chat(s.app).json()["choices"][0]["message"]["content"] == "fine"
    assert s.service.metrics.active == 0


def test_the_window_is_filled_to_the_last_token(serving: Callable[..., Any]) -> None:
    s = serving(lambda r: [65] * 1000)
    assert complete(s.app, prompt=[65] * 255).json()["usage"]["total_tokens"] == 256
    assert complete(s.app, prompt=[65] * 250, max_tokens=6).json()["usage"]["completion_tokens"] == 6
    assert error_of(complete(s.app, prompt=[65] * 250, max_tokens=7), 400)["param"] == "max_tokens"


def test_a_body_above_one_mebibyte_is_refused_whole_or_in_chunks(serving: Callable[..., Any]) -> None:
    s = serving("fine")
    path = "/v1/chat/completions"
    big = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode()

    async def chunks() -> Any:
        for i in range(0, len(big), 65536):
            yield big[i : i + 65536]

    for content in (big, chunks()):
        error = error_of(ask(s.app, ("POST", path, {"content": content}))[0], 413)
        assert error["code"] == "request_too_large" and error["type"] == "invalid_request_error"
    assert chat(s.app).status_code == 200


def test_the_api_key_guards_v1_only(serving: Callable[..., Any]) -> None:
    s = serving("fine", api_key="secret-é")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
            refused = ask(s.app, (method, path, {"headers": headers}))[0]
            assert error_of(refused, 401)["code"] == "invalid_api_key"
    right = {"Authorization": "Bearer secret-é".encode()}
    assert post(s.app, "/v1/chat/completions", CHAT, headers=right).status_code == 200
    assert ask(s.app, ("GET", "/health", {}))[0].status_code == 200


# -- the rest --------------------------------------------------------------------------------------


def test_models_version_and_metrics(serving: Callable[..., Any], until: Any) -> None:
    s = serving("abc<|im_end|>", model={"name": "org/tiny"})
    listed = ask(s.app, ("GET", "/v1/models", {}))[0].json()
    assert [m["id"] for m in listed["data"]] == ["org/tiny"]
    assert listed["data"][0]["max_model_len"] == 256
    assert ask(s.app, ("GET", "/v1/models/org/tiny", {}))[0].json() == listed["data"][0]
    assert error_of(ask(s.app, ("GET", "/v1/models/org/big", {}))[0], 404)["code"] == "model_not_found"
    assert ask(s.app, ("GET", "/version", {}))[0].json() == {"version": "1.2.3"}
    usage = chat(s.app).json()["usage"]
    chat(s.app, temperature=-1)
    until(lambda: s.worker.counters["accepted"] == 3 * s.engine.steps)
    page = ask(s.app, ("GET", "/metrics", {}))[0]
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    assert samples["dspark_ready"] == "1"
    assert samples['dspark_requests_total{reason="stop"}'] == "1"
    assert samples['dspark_refused_total{status="400"}'] == "1"
    assert samples["dspark_prompt_tokens_total"] == str(usage["prompt_tokens"])
    assert samples["dspark_generated_tokens_total"] == str(usage["completion_tokens"])
    assert samples["dspark_engine_running"] == "0" and samples["dspark_engine_waiting"] == "0"
    assert samples["dspark_engine_accepted_total"] == str(3 * s.engine.steps)
    assert samples['dspark_engine_verify_tokens_bucket_total{key="4"}'] == str(s.engine.steps)
    assert "mode" not in page.text


def test_prompt_tokens_that_were_not_computed_again_are_said(serving: Callable[..., Any], until: Any) -> None:
    """In the usage of every answer, over all its prompts, and on the metrics page under vLLM's name too."""
    s = serving("abc<|im_end|>")
    s.engine.cached_tokens = 16
    assert chat(s.app).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    stream = chat(s.app, stream=True, stream_options={"include_usage": True})
    assert events(stream)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    usage = complete(s.app, prompt=[[65] * 20, [66] * 20]).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (40, {"cached_tokens": 32})
    until(lambda: s.worker.counters["prefix_cache_hits"] == 16)
    page = ask(s.app, ("GET", "/metrics", {}))[0].text
    assert "\nvllm:prefix_cache_hits_total 16\n" in page and "vllm:prefix_cache_queries" not in page


def test_a_failing_step_ends_its_requests_with_500_and_the_server_lives_on(
    serving: Callable[..., Any], until: Any
) -> None:
    def fail(engine: Any) -> None:
        if engine.steps == 2:
            raise RuntimeError("out of luck")

    s = serving("hello world and more", block=2, before_step=fail)
    assert "out of luck" in error_of(chat(s.app), 500)["message"]
    until(lambda: s.engine.resets == 1)
    assert chat(s.app).status_code == 200
    assert ask(s.app, ("GET", "/health", {}))[0].status_code == 200
    assert s.service.metrics.finished["error"] == 1


def test_a_failing_step_ends_a_stream_with_an_error_event(serving: Callable[..., Any]) -> None:
    def fail(engine: Any) -> None:
        if engine.steps == 3:
            raise RuntimeError("out of luck")

    s = serving("hello world and more", block=2, before_step=fail)
    chunks = events(chat(s.app, stream=True))
    assert chunks[-1]["error"]["code"] == "engine_error" and "choices" in chunks[-2]


@pytest.mark.parametrize("made", [0, 2, 5])
def test_an_answer_whose_logits_are_not_finite_is_an_error_of_its_own(serving: Callable[..., Any], made: int) -> None:
    """500 with a code, or the last event of a stream; the answer beside it and the next ones come as ever."""

    def script(request: Any) -> list[int]:
        return [65] * made + [NOT_FINITE] if request.prompt_ids == [1] else [66, 67]

    s = serving(script)
    bad, good = (("POST", "/v1/completions", {"json": {"prompt": [i]}}) for i in (1, 2))
    answers = ask(s.app, bad, good)
    error = error_of(answers[0], 500)
    assert error["code"] == "not_finite" and f"after {made} tokens of this answer" in error["message"]
    assert answers[1].json()["usage"]["completion_tokens"] == 2
    last = events(complete(s.app, prompt=[1], stream=True))[-1]
    assert last["error"]["code"] == "not_finite"
    assert complete(s.app, prompt=[2]).status_code == 200 and s.engine.resets == 0
    assert 'dspark_requests_total{reason="error"} 2' in ask(s.app, ("GET", "/metrics", {}))[0].text


def test_health_turns_503_when_the_engine_is_beyond_repair(serving: Callable[..., Any], until: Any) -> None:
    def fail(engine: Any) -> None:
        raise RuntimeError("broken for good")

    s = serving("hello", before_step=fail)
    statuses = [chat(s.app).status_code for _ in range(12)]
    assert statuses[0] == 500 and statuses[-1] == 503
    until(lambda: s.worker.state == "failed")
    health = ask(s.app, ("GET", "/health", {}))[0]
    assert health.status_code == 503 and "broken for good" in health.json()["error"]


def test_everything_but_the_start_up_state_is_refused_with_503_while_loading(tokenizer: Any) -> None:
    from dspark_jax.serve.app import create_app
    from dspark_jax.serve.service import Service
    from dspark_jax.serve.worker import EngineWorker

    service = Service(EngineWorker(lambda: None))  # type: ignore[arg-type, return-value]
    service.progress = "compiled verify (3/18)"
    app = create_app(service)
    health = ask(app, ("GET", "/health", {}))[0]
    assert health.status_code == 503
    assert health.json() == {"status": "starting", "progress": "compiled verify (3/18)"}
    assert error_of(chat(app), 503)["code"] == "service_unavailable"
    assert error_of(ask(app, ("GET", "/v1/models", {}))[0], 503)["code"] == "service_unavailable"
    assert ask(app, ("GET", "/metrics", {}))[0].status_code == 200
    service.close()
