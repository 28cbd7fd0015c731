"""What a client of an OpenAI-compatible server sees: one streamed request at a time, timed token by token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request: a text, a conversation or token ids, and how many tokens are wanted."""

    prompt: str | list[int] | list[dict[str, str]]
    max_tokens: int

    def body(self, backend: str, model: str, extra: dict[str, Any]) -> dict[str, Any]:
        """The JSON of the request; raises ValueError for ids sent to the chat endpoint."""
        common = {
            "model": model,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        if backend != "openai-chat":
            if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], dict):
                raise ValueError("conversations need --backend openai-chat")
            return {**common, "prompt": self.prompt}
        if isinstance(self.prompt, str):
            return {**common, "messages": [{"role": "user", "content": self.prompt}]}
        if self.prompt and isinstance(self.prompt[0], dict):
            return {**common, "messages": self.prompt}
        raise ValueError("token ids need --backend openai: the chat endpoint takes text")


@dataclasses.dataclass
class Answer:
    """What came of a request. Times in seconds; ``itls`` are the gaps between pieces of the stream."""

    started: float
    input_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one; None where there was one token only."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


async def send(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    """Streams one request. What goes wrong is in the answer's ``error``, never raised."""
    start = time.perf_counter()
    answer = Answer(start)
    last = start
    whole = False
    try:
        async for data in _events(client, url, body):
            if data == "[DONE]":
                whole = True
                break
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            now = time.perf_counter()
            if chunk.get("choices"):
                choice = chunk["choices"][0]
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if text:
                    if not answer.ttft:
                        answer.ttft = now - start
                    else:
                        answer.itls.append(now - last)
                    last = now
                    answer.text += text
            usage = chunk.get("usage") or {}
            answer.input_tokens = usage.get("prompt_tokens", answer.input_tokens)
            answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
        answer.latency = last - start
        if not whole:
            answer.error = "the stream ended without [DONE]"
        elif not answer.output_tokens:
            answer.error = "no usage in the stream: the server must honour stream_options.include_usage"
    except (httpx.HTTPError, RuntimeError, ValueError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"HTTP {response.status_code}: {text[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                yield line[5:].strip()


async def run(
    client: httpx.AsyncClient,
    url: str,
    bodies: Sequence[dict[str, Any]],
    gaps: Sequence[float],
    max_concurrency: int | None,
    done: Any = None,
) -> tuple[list[Answer], float, int]:
    """All requests, each ``gaps[i]`` seconds after the one before it: answers, seconds in all, most at once."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    open_now = most = 0

    async def one(body: dict[str, Any]) -> Answer:
        nonlocal open_now, most
        if gate:
            await gate.acquire()
        open_now += 1
        most = max(most, open_now)
        try:
            answer = await send(client, url, body)
        finally:
            open_now -= 1
            if gate:
                gate.release()
        if done:
            done(answer)
        return answer

    start = time.perf_counter()
    due = start
    tasks = []
    for body, gap in zip(bodies, gaps, strict=True):
        due += gap
        if gap:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(body)))
    answers = list(await asyncio.gather(*tasks))
    return answers, time.perf_counter() - start, most


def gaps(number: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds between arrivals: gamma of shape ``burstiness`` and mean 1 / rate (1: Poisson); all 0 at rate inf."""
    if rate == float("inf"):
        return [0.0] * number
    return [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(number)]


def random_asks(number: int, length: int, output: int, spread: float, prefix: int, vocab: int, seed: int) -> list[Ask]:
    """Token ids at random, lengths within ``spread`` of the ones asked for, the first ``prefix`` ids the same."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(prefix)]

    def near(mean: int) -> int:
        return max(1, rng.randint(int(mean * (1 - spread)), int(mean * (1 + spread))))

    return [Ask(shared + [rng.randrange(vocab) for _ in range(near(length))], near(output)) for _ in range(number)]


def file_asks(path: str, number: int, output: int, seed: int, shuffle: bool) -> list[Ask]:
    """Prompts of a JSONL file (``prompt``, ``turns``, ``messages``, ``prompt_ids``) or of a ShareGPT JSON file.

    Where a file has fewer than ``number`` prompts they come again from the start.
    """
    from dspark_jax.data.prompts import read_prompts

    if Path(path).suffix == ".json":
        found = _sharegpt(path)
    else:
        found = [Ask(list(p.ids) if p.ids else [dict(m) for m in p.messages], output) for p in read_prompts(path)]
    if shuffle:
        random.Random(seed).shuffle(found)
    return [dataclasses.replace(found[i % len(found)], max_tokens=output) for i in range(number)]


def _sharegpt(path: str) -> list[Ask]:
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    firsts = [r["conversations"][0]["value"] for r in records if len(r.get("conversations", ())) >= 2]
    if not firsts:
        raise ValueError(f"{path}: no conversation of two turns or more")
    return [Ask([{"role": "user", "content": text}], 0) for text in firsts]


_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus page: ``name`` to the sum over its labels, ``name{key}`` for our labelled counters."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if not match:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        out[match["name"]] = out.get(match["name"], 0.0) + value
        key = re.search(r'key="([^"]*)"', match["labels"] or "")
        if key:
            out[f"{match['name']}{{{key[1]}}}"] = value
    return out


def speculation(before: dict[str, float], after: dict[str, float]) -> dict[str, float] | None:
    """Drafts and their fate between two pages of /metrics, of this server or of vLLM; None where nothing is counted.

    ``num_drafts`` are blocks verified, so the length is 1 + accepted / num_drafts: blocks, not skipped cycles.
    """
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    if "dspark_engine_offered_total" in after:
        blocks = sum(
            value
            for name, value in gained.items()
            if (match := re.fullmatch(r"dspark_engine_budgets_total\{(\d+)\}", name)) and int(match[1]) > 0
        )
        offered, accepted = gained["dspark_engine_offered_total"], gained["dspark_engine_accepted_total"]
    elif "vllm:spec_decode_num_draft_tokens_total" in after:
        blocks = gained["vllm:spec_decode_num_drafts_total"]
        offered = gained["vllm:spec_decode_num_draft_tokens_total"]
        accepted = gained["vllm:spec_decode_num_accepted_tokens_total"]
    else:
        return None
    return {
        "spec_decode_num_drafts": blocks,
        "spec_decode_draft_tokens": offered,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / offered if offered else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / blocks if blocks else 1.0,
    }
