"""How fast does an OpenAI-compatible server answer? Flags and report fields are those of `vllm bench serve`.

    python benchmarks/bench_serve.py --backend openai-chat --port 8000 --dataset-name custom \\
        --dataset-path prompts.jsonl --num-prompts 40 --custom-output-len 128 --max-concurrency 4 --save-result

Works against this server, vLLM and any other that streams with usage. Times are a client's: TTFT until the first
piece of text, TPOT (last piece - first piece) / (output tokens - 1), ITL between pieces; with speculation a piece holds
several tokens, so ITL is longer than TPOT. Token counts are the server's. What its /metrics counts of speculation is
reported beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from report import environment
from serve_client import ENDPOINTS, Answer, Ask, file_asks, gaps, parse_metrics, random_asks, run, send, speculation

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; raises SystemExit naming what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=sorted(ENDPOINTS), default="openai")
    add("--base-url", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="path; default: the backend's")
    add("--model", help="default: the first one the server lists")
    add("--api-key", help="sent as a bearer token")
    add("--dataset-name", choices=("random", "custom", "sharegpt"), default="random")
    add("--dataset-path", help="custom: JSONL; sharegpt: JSON")
    add("--disable-shuffle", action="store_true")
    add("--num-prompts", type=int, default=1000)
    add("--num-warmups", type=int, default=0)
    add("--request-rate", type=float, default=float("inf"), help="requests a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson arrivals")
    add("--max-concurrency", type=int)
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0)
    add("--random-prefix-len", type=int, default=0)
    add("--random-vocab-size", type=int, default=10_000, help="ids below this (not a flag of vLLM's)")
    add("--custom-output-len", type=int, default=256)
    add("--sharegpt-output-len", type=int, default=256)
    add("--seed", type=int, default=0)
    add("--ignore-eos", action="store_true")
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int), ("min-p", float)):
        add(f"--{name}", type=kind)
    add("--extra-body", type=json.loads, default={}, help="JSON merged into every request")
    add("--percentile-metrics", default="ttft,tpot,itl")
    add("--metric-percentiles", default="99")
    add("--ready-check-timeout-sec", type=int, default=600)
    add("--save-result", action="store_true")
    add("--save-detailed", action="store_true", help="times and texts of every request too")
    add("--result-dir", default=".")
    add("--result-filename")
    add("--label")
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or args.request_rate <= 0 or args.burstiness <= 0:
        parser.error("--num-prompts, --request-rate and --burstiness must be positive")
    if not 0 <= args.random_range_ratio < 1:
        parser.error("--random-range-ratio must lie in [0, 1)")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        parser.error("--max-concurrency must be positive")
    if args.dataset_name != "random" and not args.dataset_path:
        parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.dataset_name == "random" and args.backend == "openai-chat":
        parser.error("--dataset-name random sends token ids: use --backend openai")
    unknown = set(args.percentile_metrics.split(",")) - set(METRICS)
    if unknown:
        parser.error(f"--percentile-metrics: unknown {sorted(unknown)}, known {sorted(METRICS)}")
    return args


def asks(args: argparse.Namespace) -> list[Ask]:
    """The requests, the same ones for the same seed."""
    if args.dataset_name == "random":
        return random_asks(
            args.num_prompts,
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.random_prefix_len,
            args.random_vocab_size,
            args.seed,
        )
    output = args.custom_output_len if args.dataset_name == "custom" else args.sharegpt_output_len
    return file_asks(args.dataset_path, args.num_prompts, output, args.seed, not args.disable_shuffle)


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling fields that were asked for; the others are the server's."""
    names = ("temperature", "top_p", "top_k", "min_p")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**chosen, **({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body}


async def wait_ready(client: httpx.AsyncClient, url: str, body: dict[str, Any], seconds: float) -> None:
    """Sends one request until it is answered. Raises RuntimeError with the last error after ``seconds``."""
    end = time.monotonic() + seconds
    while (answer := await send(client, url, body)).error:
        if time.monotonic() > end or answer.error.startswith("RuntimeError: HTTP 4"):
            raise RuntimeError(f"{url} does not answer: {answer.error}")
        await asyncio.sleep(1.0)


async def page(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters; empty where it has none."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError:
        return {}
    return parse_metrics(response.text) if response.status_code == 200 else {}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    base = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits) as client:
        url = args.endpoint or ENDPOINTS[args.backend]
        wanted = asks(args)
        model = args.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        bodies = [ask.body(args.backend, model, extra_body(args)) for ask in wanted]
        await wait_ready(client, url, {**bodies[0], "max_tokens": 2}, args.ready_check_timeout_sec)
        for body in bodies[: args.num_warmups]:
            await send(client, url, body)
        times = gaps(len(bodies), args.request_rate, args.burstiness, random.Random(args.seed))
        before, count = await page(client), 0

        def show(answer: Answer) -> None:
            nonlocal count
            count += 1
            if sys.stderr.isatty():
                print(f"\r{count}/{len(bodies)}", end="", file=sys.stderr, flush=True)

        answers, seconds, most = await run(client, url, bodies, times, args.max_concurrency, show)
        spoken = speculation(before, await page(client))
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": model,
        "num_prompts": len(bodies),
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summary(args, answers, seconds, most),
        **(spoken or {}),
    }


def summary(args: argparse.Namespace, answers: list[Answer], seconds: float, most: int) -> dict[str, Any]:
    """Report fields under vLLM's names; milliseconds where a name says so."""
    good = [a for a in answers if not a.error]
    tokens = sum(a.output_tokens for a in good)
    prompt = sum(a.input_tokens for a in good)
    out: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (tokens + prompt) / seconds,
        "max_concurrent_requests": most,
    }
    values = {
        "ttft": [a.ttft for a in good],
        "tpot": [a.tpot for a in good if a.tpot is not None],
        "itl": [gap for a in good for gap in a.itls],
        "e2el": [a.latency for a in good],
    }
    for name in args.percentile_metrics.split(","):
        ms = 1000 * np.asarray(values[name] or [0.0])
        out[f"mean_{name}_ms"], out[f"median_{name}_ms"] = float(ms.mean()), float(np.median(ms))
        out[f"std_{name}_ms"] = float(ms.std())
        for p in args.metric_percentiles.split(","):
            out[f"p{p}_{name}_ms"] = float(np.percentile(ms, float(p)))
    if args.save_detailed:
        out |= {
            "input_lens": [a.input_tokens for a in answers],
            "output_lens": [a.output_tokens for a in answers],
            "ttfts": [a.ttft for a in answers],
            "itls": [a.itls for a in answers],
            "generated_texts": [a.text for a in answers],
        }
    if any(a.error for a in answers):
        out["errors"] = [a.error for a in answers]
    return out


def show(result: dict[str, Any], args: argparse.Namespace) -> str:
    """The report as text."""

    def line(name: str, value: Any) -> str:
        return f"{name + ':':<40} {value if isinstance(value, int | str) else format(value, '.2f'):<10}".rstrip()

    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += [line("Successful requests", result["completed"]), line("Failed requests", result["failed"])]
    if args.max_concurrency:
        lines.append(line("Maximum request concurrency", args.max_concurrency))
    lines += [
        line("Benchmark duration (s)", result["duration"]),
        line("Total input tokens", result["total_input_tokens"]),
        line("Total generated tokens", result["total_output_tokens"]),
        line("Request throughput (req/s)", result["request_throughput"]),
        line("Output token throughput (tok/s)", result["output_throughput"]),
        line("Peak concurrent requests", result["max_concurrent_requests"]),
        line("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for name in args.percentile_metrics.split(","):
        lines.append(f"{METRICS[name]:-^50}")
        short = name.upper()
        lines += [line(f"{kind.title()} {short} (ms)", result[f"{kind}_{name}_ms"]) for kind in ("mean", "median")]
        lines += [line(f"P{p} {short} (ms)", result[f"p{p}_{name}_ms"]) for p in args.metric_percentiles.split(",")]
    if "spec_decode_num_drafts" in result:
        lines += [
            f"{'Speculative Decoding':-^50}",
            line("Acceptance rate (%)", result["spec_decode_acceptance_rate"]),
            line("Acceptance length", result["spec_decode_acceptance_length"]),
            line("Drafts", int(result["spec_decode_num_drafts"])),
            line("Draft tokens", int(result["spec_decode_draft_tokens"])),
            line("Accepted tokens", int(result["spec_decode_accepted_tokens"])),
        ]
    return "\n".join([*lines, "=" * 50])


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        result = asyncio.run(measure(args))
    except (RuntimeError, ValueError, OSError, httpx.HTTPError) as error:
        base = args.base_url or f"http://{args.host}:{args.port}"
        what = f"{base}: no answer ({error}); is the server up, and is this its address?"
        print(f"bench_serve: {what if isinstance(error, httpx.TransportError) else error}", file=sys.stderr)
        return 1
    print(show(result, args))
    first = next((error for error in result.get("errors", ()) if error), None)
    if first:
        print(f"bench_serve: {result['failed']} requests failed; the first: {first}", file=sys.stderr)
    if args.save_result:
        name = args.result_filename or f"{args.backend}-{result['model_id'].replace('/', '_')}-{result['date']}.json"
        path = Path(args.result_dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**environment(), **result}, indent=1) + "\n")
        print(f"result in {path}")
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
