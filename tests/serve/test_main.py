"""Command line, start-up, ready line, exit."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import pytest

from dspark_jax import load as models
from dspark_jax.serve import __main__ as server
from dspark_jax.serve import startup
from dspark_jax.serve.args import DEFAULT_DRAFTER, DEFAULT_TARGET, Speculation, UsageError, parse_args

# -- flags -----------------------------------------------------------------------------------------


def test_without_a_model_the_embedded_pair_is_served_adaptively() -> None:
    args = parse_args([])
    assert (args.model, args.name, args.max_num_seqs, args.host, args.port) == (
        DEFAULT_TARGET,
        DEFAULT_TARGET,
        8,
        "127.0.0.1",
        8000,
    )
    assert args.speculation == Speculation(drafter=DEFAULT_DRAFTER, adaptive=True, implied=True)


def test_a_method_alone_is_the_drafter_that_is_shipped_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded target, whether it is named or not. Where none is shipped, "model" is missing."""
    other = f"{DEFAULT_TARGET}-eagle3"
    config = ["--speculative-config", '{"method": "eagle3"}']
    monkeypatch.setattr(models, "SHIPPED_DRAFTERS", (DEFAULT_DRAFTER,))
    with pytest.raises(UsageError, match='"model" is missing'):
        parse_args(config)
    monkeypatch.setattr(models, "SHIPPED_DRAFTERS", (DEFAULT_DRAFTER, other))
    assert parse_args(config).speculation == Speculation(drafter=other, method="eagle3", adaptive=True)
    assert parse_args([DEFAULT_TARGET, *config]).speculation == Speculation(drafter=other, method="eagle3")
    with pytest.raises(UsageError, match='"model" is missing'):
        parse_args(["another/target", *config])


@pytest.mark.parametrize(
    ("argv", "want"),
    [
        (["some/model"], Speculation()),
        (["--speculative-config", '{"method": "none"}'], Speculation(method="none")),
        (
            ["--speculative-config", '{"num_speculative_tokens": 3}'],
            Speculation(drafter=DEFAULT_DRAFTER, num_speculative_tokens=3, adaptive=True),
        ),
        (
            ["m", "--speculative-config", '{"method": "dspark", "model": "d", "verification": "coupled"}'],
            Speculation(drafter="d", method="dspark", verification="coupled"),
        ),
        (
            [
                "m",
                "--speculative-config",
                '{"model": "d", "enable_adaptive_verification": true, "method": null}',
            ],
            Speculation(drafter="d", adaptive=True),
        ),
        (["m", "--speculative-config", '{"method": "mtp"}'], Speculation(drafter="m", method="mtp")),
    ],
)
def test_speculative_config_reads_as_in_vllm(argv: list[str], want: Speculation) -> None:
    assert parse_args(argv).speculation == want


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--speculative-config", "{broken"], "--speculative-config"),
        (["--speculative-config", "[]"], "--speculative-config"),
        (["--speculative-config", '{"modle": "x"}'], "'modle'"),
        (["--speculative-config", '{"method": "medusa"}'], "'method'"),
        (["--speculative-config", '{"num_speculative_tokens": "3"}'], "'num_speculative_tokens'"),
        (["--speculative-config", '{"num_speculative_tokens": 0}'], "'num_speculative_tokens'"),
        (["--speculative-config", '{"num_speculative_tokens": true}'], "'num_speculative_tokens'"),
        (["--speculative-config", '{"enable_adaptive_verification": 1}'], "'enable_adaptive_verification'"),
        (["--speculative-config", '{"verification": "maybe"}'], "'verification'"),
        (["m", "--speculative-config", '{"method": "dspark"}'], '"model" is missing'),
        (["--default-chat-template-kwargs", "nope"], "--default-chat-template-kwargs"),
        (["--port", "70000"], "--port"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--dtype", "int3"], "--dtype"),
        (["--attention-backend", "magic"], "--attention-backend"),
        (["--seed", "-1"], "--seed"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_bad_flag_is_an_error_that_names_it(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.main(argv) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.startswith("error: ")


def test_aliases_of_vllm_are_read() -> None:
    args = parse_args(["--attention-backend", "TRITON_ATTN", "--dtype", "float", "--no-enable-prefix-caching"])
    assert (args.attention_backend, args.dtype, args.enable_prefix_caching) == ("triton", "float32", False)
    assert parse_args(["m", "--served-model-name", "n"]).name == "n"
    assert parse_args(["--default-chat-template-kwargs", '{"a": 1}']).default_chat_template_kwargs == {"a": 1}


# -- building the engine ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FakeConfig:
    max_num_seqs: int = 8
    max_model_len: int = 2048
    mode: str = "fixed"
    num_speculative_tokens: int | None = None
    verification: str = "rejection"
    seed: int = 0
    profile_dir: str | None = None
    enable_prefix_caching: bool = True
    max_num_batched_tokens: int | None = None


class FakeEngine:
    complaints: tuple[str, ...] = ()

    def __init__(self, target: Any, drafter: Any, config: FakeConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.mode, self.notes = config.mode, list(self.complaints)

    def warmup(self, say: Any) -> None:
        say("compiled verify slots=1 tokens=6 context=512 (1/1)")


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces loaders and engine; ``loaders.target`` and ``loaders.drafter`` can be changed."""
    import dspark_jax

    target = SimpleNamespace(
        config=SimpleNamespace(num_layers=2, eos_token_ids=(2, 3)),
        vocab_size=100,
        vocab_limit=90,
        max_positions=4096,
        tokenizer=SimpleNamespace(eos_token_id=3),
    )
    drafter = SimpleNamespace(config=SimpleNamespace(method="dspark"), block_size=7)
    fakes = SimpleNamespace(target=target, drafter=drafter, calls=[], broken=None)

    def load_drafter(path: str, target: Any, **kwargs: Any) -> Any:
        fakes.calls.append((path, kwargs))
        if fakes.broken is not None:
            raise ValueError(fakes.broken)
        if fakes.drafter is None:
            raise FileNotFoundError(f"{path}: not shipped yet")
        return fakes.drafter

    engine = SimpleNamespace(Engine=FakeEngine, EngineConfig=FakeConfig, Request=dict)
    monkeypatch.setitem(sys.modules, "dspark_jax.engine", engine)
    monkeypatch.setattr(dspark_jax, "engine", engine, raising=False)
    monkeypatch.setattr(dspark_jax, "load_target", lambda path, **kwargs: target, raising=False)
    monkeypatch.setattr(dspark_jax, "load_drafter", load_drafter, raising=False)
    monkeypatch.setattr(startup, "check_drafter", lambda path: None)
    return fakes


def load(argv: list[str]) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return startup.load(parse_args(argv), lines.append), lines


def test_flags_reach_the_engine_and_the_model(loaders: SimpleNamespace) -> None:
    config = '{"num_speculative_tokens": 3, "verification": "coupled"}'
    loaded, lines = load(["--speculative-config", config, "--max-num-seqs", "4", "--seed", "5", "--dtype", "float32"])
    assert loaded.engine.config == FakeConfig(4, 2048, "lagged", 3, "coupled", 5)
    assert loaders.calls == [(DEFAULT_DRAFTER, {"dtype": "float32", "mesh": None})]
    model = loaded.model
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (90, 2048, (2, 3))
    assert lines[-1] == "compiled verify slots=1 tokens=6 context=512 (1/1)"
    assert not any("WARNING" in line for line in lines)
    for flag, where in (("", ""), ("here", "here/step_time")):  # beside the compiled programs
        assert load(["--compilation-cache-dir", flag])[0].engine.config.profile_dir == where


def test_the_window_is_2048_or_the_models_if_that_is_smaller(loaders: SimpleNamespace) -> None:
    assert load(["--max-model-len", "4096"])[0].model.max_model_len == 4096
    with pytest.raises(UsageError, match="--max-model-len: 4097"):
        load(["--max-model-len", "4097"])
    loaders.target.max_positions = 100
    assert load([])[0].model.max_model_len == 100


def test_what_the_engine_cannot_do_as_asked_is_said_at_start_up(
    loaders: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "complaints", ("WARNING mode lagged needs step times: fixed instead",))
    _, lines = load([])
    assert "WARNING mode lagged needs step times: fixed instead" in lines


def test_a_missing_shipped_drafter_means_plain_decoding_unless_it_was_asked_for(
    loaders: SimpleNamespace,
) -> None:
    loaders.drafter = None
    loaded, lines = load([])
    assert loaded.engine.drafter is None and loaded.engine.config.mode == "none"
    assert any("WARNING the shipped drafter is missing" in line for line in lines)
    with pytest.raises(FileNotFoundError):
        load(["--speculative-config", '{"method": "dspark"}'])


def test_method_none_and_a_model_without_config_decode_plainly(loaders: SimpleNamespace) -> None:
    for argv in (["m"], ["--speculative-config", '{"method": "none"}']):
        assert load(argv)[0].engine.config.mode == "none"
    assert loaders.calls == []


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_chains_are_served_with_blocks_of_any_length(loaders: SimpleNamespace, method: str) -> None:
    loaders.drafter.config.method = method
    config = f'{{"method": "{method}", "model": "d", "num_speculative_tokens": 12}}'
    loaded, lines = load(["m", "--speculative-config", config])
    assert loaded.engine.config.num_speculative_tokens == 12
    assert any(line.startswith(f"loaded drafter d: {method}") for line in lines)


def test_mtp_layers_of_a_target_are_refused_saying_what_to_name(loaders: SimpleNamespace) -> None:
    loaders.broken = "m/config.json: no block_size"
    with pytest.raises(UsageError, match='MTP layers inside.*as "model" .m/config.json: no block_size'):
        load(["m", "--speculative-config", '{"method": "mtp"}'])
    with pytest.raises(ValueError, match="^m/config.json: no block_size"):
        load(["m", "--speculative-config", '{"method": "eagle3", "model": "d"}'])


def test_flags_that_cannot_be_honoured_are_errors_or_said(loaders: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="--tensor-parallel-size: 64"):
        load(["--tensor-parallel-size", "64"])
    with pytest.raises(UsageError, match="--data-parallel-size 64"):
        load(["--data-parallel-size", "64"])
    with pytest.raises(UsageError, match="--node-rank: 2 is not below --nnodes 2"):
        load(["--nnodes", "2", "--node-rank", "2"])
    with pytest.raises(UsageError, match="--attention-backend: triton"):
        load(["--attention-backend", "triton"])
    with pytest.raises(UsageError, match="method is 'eagle3'.*'dspark' drafter"):
        load(["--speculative-config", '{"method": "eagle3", "model": "d"}'])
    _, lines = load(["--gpu-memory-utilization", "0.5", "--attention-backend", "xla", "--no-enable-prefix-caching"])
    assert [line for line in lines if "has no effect" in line] == [
        "WARNING --gpu-memory-utilization has no effect in this version"
    ]


def test_prefix_caching_and_the_budget_of_a_step_reach_the_engine(loaders: SimpleNamespace) -> None:
    config = load(["m", "--no-enable-prefix-caching", "--max-num-batched-tokens", "96"])[0].engine.config
    assert not config.enable_prefix_caching and config.max_num_batched_tokens == 96


# -- the compilation cache -------------------------------------------------------------------------


def cache_dir() -> str:
    config: Any = jax.config
    return config.jax_compilation_cache_dir


@pytest.fixture
def jax_cache() -> Any:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_compilation_cache_is_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jax_cache: None
) -> None:
    for name in ("DSPARK_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    lines: list[str] = []
    startup.enable_compilation_cache(None, lines.append)
    assert cache_dir() == str(tmp_path / "xdg" / "dspark_jax" / "xla")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    startup.enable_compilation_cache(None, lines.append)
    assert cache_dir() == str(tmp_path / "jax")
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "own"))
    startup.enable_compilation_cache(None, lines.append)
    assert cache_dir() == str(tmp_path / "own" / "xla")
    startup.enable_compilation_cache(str(tmp_path / "flag"), lines.append)
    assert cache_dir() == str(tmp_path / "flag")
    assert (tmp_path / "flag").is_dir() and not list((tmp_path / "flag").iterdir())
    startup.enable_compilation_cache("", lines.append)
    assert lines[-1] == "compilation cache: off"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--compilation-cache-dir"):
        startup.enable_compilation_cache(str(tmp_path / "file"), lines.append)
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "file"))
    startup.enable_compilation_cache(None, lines.append)
    assert lines[-1].startswith("compilation cache: off, cannot write")


# -- the process -----------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert server.main(["--port", str(port)]) == 1
    assert f"port {port}" in capsys.readouterr().err


def test_a_model_that_does_not_load_ends_the_server_with_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Any, say: Any, processes: Any) -> Any:
        raise ValueError("model.safetensors: truncated")

    monkeypatch.setattr(server, "load", fail)
    assert server.main(["--port", "0", "--compilation-cache-dir", ""]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: model.safetensors: truncated\n"
    assert server.READY_LINE not in captured.out


DRIVER = """
    import sys, time
    from types import SimpleNamespace
    from dspark_jax.serve import __main__ as server
    from dspark_jax.serve.service import ServedModel

    class Engine:
        submit = step = cancel = None
        def has_work(self): return False
        def counters(self): return {}

    def load(args, say, processes):
        say("compiled verify slots=1 tokens=6 context=512 (1/2)")
        while sys.stdin.readline().strip() != "go":
            pass
        say("compiled verify slots=1 tokens=6 context=512 (2/2)")
        return SimpleNamespace(engine=Engine(), model=ServedModel("n", "r", None, 9, 64, (), dict))

    server.load = load
    server._exit(server.main(["--port", "0", "--compilation-cache-dir", ""]))
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
def test_the_ready_line_comes_once_everything_is_compiled_and_sigterm_ends_in_peace(when: str) -> None:
    """The port answers 503 before; no earlier line holds the text of the ready line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = [process.stdout.readline()]
        url = lines[0].split("listening on ")[1].split(";")[0]
        while "(1/2)" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        health = httpx.get(url + "/health")
        assert health.status_code == 503 and "(1/2)" in health.json()["progress"]
        if when == "ready":
            process.stdin.write("go\n")
            process.stdin.flush()
            while lines[-1] != server.READY_LINE + "\n":
                assert server.READY_LINE not in lines[-1]
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            assert httpx.get(url + "/health").status_code == 200
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(15) == 0, rest
        assert server.READY_LINE not in rest and "Traceback" not in rest
        assert time.monotonic() - started < 10
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_the_real_engine_has_what_the_server_uses() -> None:
    """The other tests run on scripted engines: this one ties them to the real one's names."""
    from dspark_jax import engine

    request = {field.name for field in dataclasses.fields(engine.Request)}
    assert request >= {"prompt_ids", "max_new_tokens", "sampling", "seed", "verification", "stop_token_ids"}
    event = {field.name for field in dataclasses.fields(engine.Event)}
    assert event >= {"id", "tokens", "finished", "finish_reason", "committed", "offered"}
    config = {field.name for field in dataclasses.fields(engine.EngineConfig)}
    assert config >= {field.name for field in dataclasses.fields(FakeConfig)}
    methods = ("submit", "step", "cancel", "has_work", "counters", "reset", "warmup")
    assert all(callable(getattr(engine.Engine, name)) for name in methods)
    assert {"none", "fixed", "lagged"} <= set(engine.MODES)
