"""``python -m dspark_jax.serve`` as two processes of ``jax.distributed``, over HTTP: they answer what one process
answers, token for token, and each of them notices the end of the other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.checkpoint import save
from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.config_io import decoder_config_to_hf
from dspark_jax.drafters import drafter_specs
from dspark_jax.params import ParamSpec, is_spec, spec_leaves
from dspark_jax.serve.__main__ import READY_LINE
from dspark_jax.serve.args import UsageError, parse_args
from dspark_jax.serve.processes import Processes
from dspark_jax.targets import decoder_specs

VOCAB, HIDDEN = 64, 32
ROOT = Path(__file__).resolve().parents[2]


def write_models(directory: Path) -> tuple[Path, Path]:
    """A target and a drafter of random numbers, in directories. A token is a word, so a text tells every token."""
    import jax

    rng = np.random.default_rng(5)

    def draw(spec: ParamSpec) -> np.ndarray:
        if len(spec.shape) == 1:  # of a norm, or a bias
            return np.ones(spec.shape, np.float32)
        small = 0.1 if "proj" in spec.name else 1.0
        return (small * rng.standard_normal(spec.shape)).astype(np.float32)

    layer = LayerConfig(num_kv_heads=2, head_dim=8, rope=RopeConfig())
    config = DecoderConfig(
        family="qwen3", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_heads=4, layers=(layer,) * 2,
        qk_norm=True, max_positions=64, eos_token_ids=(0,),
    )  # fmt: skip
    target = directory / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(decoder_config_to_hf(config)))
    weights = {spec.name: draw(spec) for spec in spec_leaves(decoder_specs(config))}
    save(target / "model.safetensors", weights)
    words = Tokenizer(models.WordLevel({"</s>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(target)

    drafting = DrafterConfig(
        method="dspark", decoder=DecoderConfig(**{**vars(config), "layers": (layer,)}), block_size=3,
        target_layer_ids=(-1, 0), mask_token_id=VOCAB - 1, num_target_layers=2, markov_rank=HIDDEN,
        markov_head="vanilla", confidence_head=True, confidence_with_markov=True,
    )  # fmt: skip
    specs = drafter_specs(drafting)
    params = jax.tree.map(draw, specs, is_leaf=is_spec)
    # The target is mostly a bigram model: its head after its own embedding. So is then the drafter's bias.
    params["markov"] |= {"w1": 3 * weights["model.embed_tokens.weight"], "w2": weights["lm_head.weight"]}
    return target, write_deepspec(directory / "drafter", drafting, params, specs)


class Process:
    """A server process; its output goes to a file."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self.out = directory / f"{name}.txt"
        command = [sys.executable, "-m", "dspark_jax.serve", *arguments]
        with self.out.open("w") as out:
            self.popen = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}
            )

    @property
    def text(self) -> str:
        return self.out.read_text()

    def says(self, words: str) -> None:
        """Waits for words of its output."""
        end = time.monotonic() + 300
        while words not in self.text:
            assert self.popen.poll() is None and time.monotonic() < end, self.text[-4000:]
            time.sleep(0.1)

    def ready(self) -> str:
        """Waits until it serves; its URL."""
        self.says(READY_LINE)
        return self.text.split("listening on ")[1].split(";")[0]

    def ended(self, timeout_s: float) -> int:
        """Its exit status."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s} s:\n{self.text[-4000:]}") from None


class Group:
    """One server of one or two processes on the tiny target. ``drafter``: of the tiny drafter's directory."""

    def __init__(self, directory: Path, processes: int, *, drafter: Path | None = None) -> None:
        common = [
            str(directory / "target"), "--port", "0", "--max-model-len", "48", "--compilation-cache-dir", "",
        ]  # fmt: skip
        if drafter is None:
            common += ["--max-num-seqs", "1", "--no-enable-prefix-caching"]
        else:
            config = {"method": "dspark", "model": str(drafter), "enable_adaptive_verification": False}
            common += ["--speculative-config", json.dumps(config), "--max-num-seqs", "2"]
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            common += ["--tensor-parallel-size", str(processes), "--nnodes", str(processes), "--master-port", str(port)]
        self.processes = [
            Process(directory, f"{processes}-{rank}", *common, *(["--node-rank", str(rank)] if processes > 1 else []))
            for rank in range(processes)
        ]

    def __enter__(self) -> list[Process]:
        return self.processes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()


def chat(url: str, content: str, **sampling: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 14, **sampling}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=60)


def answers(url: str) -> list[tuple[str, str, int]]:
    """Greedy and sampled chats, some of which begin alike (a prefix that is known already)."""
    found = []
    for i in range(4):
        words = " ".join(f"w{1 + (7 * i + k) % 60}" for k in range(3 + i)) if i % 2 else "w2 w3 " * 9 + f"w{4 + i}"
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": i}):
            got = chat(url, words, **sampling).json()
            choice = got["choices"][0]
            found.append((choice["message"]["content"], choice["finish_reason"], got["usage"]["completion_tokens"]))
    return found


@pytest.mark.slow
def test_two_processes_answer_what_one_answers_and_a_lost_one_ends_the_server(tmp_path: Path) -> None:
    """Weights cut over both, in float32, which is why near ties could part the texts; at these seeds there is none.

    Then process 1 is killed while an answer is under way: its client gets an error, process 0 says who is gone and
    ends by itself."""
    _, drafter = write_models(tmp_path)
    with Group(tmp_path, 1, drafter=drafter) as (alone,):
        one = answers(url := alone.ready())
        accepted = re.search(r"dspark_engine_accepted_total (\d+)", httpx.get(url + "/metrics").text)
        assert accepted is not None and int(accepted[1]) > 0
    with Group(tmp_path, 2, drafter=drafter) as (leader, follower):
        url = leader.ready()
        assert answers(url) == one
        follower.popen.send_signal(signal.SIGSTOP)  # so that the answer is under way until it is killed
        body = json.dumps({"prompt": [5], "max_tokens": 14})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=60) as client:
            client.sendall((head + body).encode())
            follower.popen.kill()
            status = client.makefile("rb").readline()
        assert status.split()[1] in (b"500", b"503"), status
        assert leader.ended(30) == 1
        assert "error: process 1 is gone, and this one cannot go on alone: start all of them again" in leader.text
    assert sum(count for _, _, count in one) > 60  # texts, not first words


@pytest.mark.slow
def test_sigterm_ends_both_processes_in_peace(tmp_path: Path) -> None:
    """It goes to process 0, and may come to the other one too, which waits for the first."""
    write_models(tmp_path)
    with Group(tmp_path, 2) as (leader, follower):
        assert chat(leader.ready(), "w5").status_code == 200
        for process in (follower, leader):
            process.popen.send_signal(signal.SIGTERM)
        for process in (leader, follower):
            assert process.ended(20) == 0, process.text[-4000:]
            assert "error" not in process.text and "Traceback" not in process.text


@pytest.mark.slow
def test_a_process_whose_leader_is_lost_says_so_and_ends(tmp_path: Path) -> None:
    """JAX's own coordination, which watches process 0 too, may be the first to notice and then ends the process."""
    write_models(tmp_path)
    with Group(tmp_path, 2) as (leader, follower):
        follower.says("follows process 0")
        leader.popen.kill()
        assert follower.ended(30) != 0
        ours, jaxs = "error: process 0 is gone", "JAX distributed service detected fatal errors"
        assert ours in follower.text or jaxs in follower.text, follower.text[-4000:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_still_waits_for_process_0_can_be_ended(number: signal.Signals, tmp_path: Path) -> None:
    """At once: nobody has an answer under way. JAX waits for minutes, outside Python."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored by whoever runs these tests, and so by their processes")
    with socket.socket() as taken:  # bound, so that nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        waiting = Process(tmp_path, "waiting", "--nnodes", "2", "--node-rank", "1", "--master-port", port)
        try:
            waiting.says("waiting for process 0")
            time.sleep(1.0)
            waiting.popen.send_signal(number)
            assert waiting.ended(10) == 128 + number
        finally:
            waiting.popen.kill()
            waiting.popen.wait()


def test_a_meeting_point_that_is_taken_is_named_before_jax_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would end process 0 by a fault of memory."""

    def initialize(*_: Any, **__: Any) -> None:
        raise AssertionError("it came to JAX")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = parse_args(["--nnodes", "2", "--node-rank", "0", "--master-port", str(port)])
        with pytest.raises(
            UsageError, match=f"argument --master-port: process 0 cannot listen on port {port} .*another"
        ):
            Processes().join(args, lambda line: None)
