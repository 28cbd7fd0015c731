"""benchmarks/bench_serve.py against the real server over a scripted engine."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module; its neighbours are found as when it is run as a script."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("bench_serve", "serve_client", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bench_serve

    return bench_serve


def test_counts_are_the_servers_and_every_field_is_written(
    bench: ModuleType, serving: Callable[..., Any], live: Any, tmp_path: Path, tokenizer: Any
) -> None:
    """Six prompts, an answer of known length: tokens in and out are known, and the throughputs are their quotients."""
    text = "the cat sat on the mat"
    s = serving(text + "<|im_end|>")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [w]}) + "\n" for w in ("hello", "world", "cat")))
    with live(s.app) as url:
        code = bench.main(
            f"--backend openai-chat --base-url {url} --dataset-name custom --dataset-path {prompts} --num-prompts 6 "
            "--custom-output-len 50 --max-concurrency 2 --save-result --save-detailed "
            f"--result-dir {tmp_path} --result-filename r.json "
            "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99".split()
        )
    assert code == 0
    r = json.loads((tmp_path / "r.json").read_text())
    each = len(tokenizer.encode(text)) + 1  # the stop token counts
    assert (r["completed"], r["failed"], r["total_output_tokens"]) == (6, 0, 6 * each)
    assert r["output_lens"] == [each] * 6 and set(r["generated_texts"]) == {text}
    assert r["total_input_tokens"] == sum(r["input_lens"]) > 0
    assert r["output_throughput"] == pytest.approx(6 * each / r["duration"])
    assert r["total_token_throughput"] == pytest.approx((6 * each + r["total_input_tokens"]) / r["duration"])
    assert 1 <= r["max_concurrent_requests"] <= 2
    assert r["p50_e2el_ms"] == pytest.approx(r["median_e2el_ms"]) and r["p99_e2el_ms"] >= r["p50_ttft_ms"] > 0


def test_requests_the_server_refuses_are_counted_as_failed(
    bench: ModuleType, serving: Callable[..., Any], live: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids outside the vocabulary get HTTP 400: the benchmark stops with the server's own words and code 1."""
    s = serving("fine<|im_end|>")
    with live(s.app) as url:
        code = bench.main(
            f"--base-url {url} --num-prompts 2 --random-input-len 4 --random-output-len 4 --extra-body".split()
            + ['{"nonsense": 1}']
        )
    assert code == 1
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--dataset-name custom", "--dataset-path"),
        ("--backend openai-chat", "--backend openai"),
        ("--percentile-metrics ttft,speed", "speed"),
        ("--num-prompts 0", "--num-prompts"),
        ("--random-range-ratio 1.5", "--random-range-ratio"),
    ],
)
def test_a_wrong_flag_is_named(bench: ModuleType, line: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.arguments(line.split())
    assert named in capsys.readouterr().err


def test_speculation_is_read_from_our_counters_and_from_vllms(bench: ModuleType) -> None:
    """Ten blocks of 3, 12 drafts kept: rate 40 %, length 2.2; the same numbers under both names."""
    ours = (
        "# TYPE dspark_engine_offered_total counter\ndspark_engine_offered_total 30\n"
        'dspark_engine_accepted_total 12\ndspark_engine_budgets_total{key="0"} 5\n'
        'dspark_engine_budgets_total{key="3"} 10\n'
    )
    theirs = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 10\nvllm:spec_decode_num_draft_tokens_total{engine="0"} 30\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12\n'
    )
    for text in (ours, theirs):
        got = bench.speculation({}, bench.parse_metrics(text))
        assert got["spec_decode_acceptance_rate"] == pytest.approx(40.0)
        assert got["spec_decode_acceptance_length"] == pytest.approx(2.2)
    assert bench.speculation({}, {}) is None


def test_arrivals_have_the_rate_asked_for(bench: ModuleType) -> None:
    """4000 Poisson gaps at 5 a second: the mean is 0.2 s with standard error 0.0032; 0.02 off is six of them
    (false alarm below 1e-8). At rate inf nobody waits."""
    found = bench.gaps(4000, 5.0, 1.0, random.Random(0))
    assert abs(sum(found) / len(found) - 0.2) < 0.02
    assert bench.gaps(3, float("inf"), 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    one, two = (bench.random_asks(3, 20, 8, 0.5, 4, 100, 7) for _ in range(2))
    assert one == two and len({tuple(a.prompt[:4]) for a in one}) == 1
    assert all(14 <= len(a.prompt) <= 34 and 4 <= a.max_tokens <= 12 for a in one)
