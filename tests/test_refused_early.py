"""What a command line names wrongly is refused before a target's weights are read, with one line that names it."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import dspark_jax
from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_io import decoder_config_to_hf
from dspark_jax.evaluate import calibration, run
from dspark_jax.load import check_drafter, target_config
from dspark_jax.serve import startup
from dspark_jax.serve.args import UsageError, parse_args
from tests.train import tiny_run

ROOT = Path(__file__).resolve().parents[1]
LAYER = LayerConfig(1, 8, RopeConfig())
TARGET = DecoderConfig("llama", tiny_run.VOCAB, 16, 32, 2, (LAYER, LAYER), tie_embeddings=True, max_positions=64)
FITS = ("drafter.target_layer_ids=[0, 1]", "drafter.copy_layers=[1]", "drafter.draft_vocab=20")
"""What an EAGLE-3 drafter of this target must set otherwise than that of SmolLM2."""


def script(name: str) -> Any:
    """A command as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def load_target(*_: Any, **__: Any) -> Any:
    raise AssertionError("the target was loaded")


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whoever loads a target fails; a command may set the cache of programs."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    for place in (dspark_jax, run, calibration):
        monkeypatch.setattr(place, "load_target", load_target)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def told(main: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one error of a command that refuses its input."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    return error


def target_directory(path: Path) -> Path:
    """A target that has a configuration, and no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(decoder_config_to_hf(TARGET)))
    return path


@pytest.mark.parametrize("method", ["dspark", "eagle3", "mtp"])
def test_the_server_refuses_a_drafter_that_is_not_there(method: str, tmp_path: Path) -> None:
    def load(place: Path | str) -> None:
        config = json.dumps({"method": method, "model": str(place)})
        startup.load(parse_args(["m", "--speculative-config", config]), lambda line: None)

    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json: no such file; a drafter is a directory with"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)
    with pytest.raises(ValueError, match="expected the directory"):
        load(weights)


def test_mtp_layers_of_a_gguf_target_are_refused_with_what_to_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match='MTP layers inside.*as "model"'):
        startup.load(parse_args([str(path), "--speculative-config", '{"method": "mtp"}']), lambda line: None)


def test_the_shipped_drafter_passes_the_check() -> None:
    check_drafter("smollm2-135m-instruct-dspark")


def test_an_evaluation_refuses_a_drafter_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Among others that are: plain decoding of all prompts would have come first."""
    drafters = '[{name="a", path="smollm2-135m-instruct-dspark"}, {name="b", path="./nowhere"}]'
    argv = ["--config", str(ROOT / "configs/evaluate/smollm2.toml"), "--out", str(tmp_path / "out")]
    error = told(script("evaluate").main, [*argv, "--set", f"drafters={drafters}"], capsys)
    assert "./nowhere: no such" in error


def test_a_calibration_refuses_a_drafter_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", str(ROOT / "configs/calibrate/smollm2.toml"), "--out", str(tmp_path / "out")]
    assert "./nowhere: no such" in told(script("calibrate").main, [*argv, "--set", "drafter=./nowhere"], capsys)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            ("drafter.method=mtp", "drafter.block_size=1"),
            "drafter.target_layer_ids of an MTP module .* found [1, 14, 26]",
        ),
        (("drafter.draft_vocab=20",), "drafter: target_layer_ids must rise from -1 .* to 1 or less, found [1, 14, 26]"),
        ((*FITS, "data.train=./nowhere"), "nowhere"),
        ((*FITS, "drafter.start_from=./nowhere"), "drafter.start_from: ./nowhere: no such directory"),
    ],
)
def test_training_of_a_chain_refuses_taps_data_and_its_beginning_before_the_target(
    changes: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    train = script("train")
    monkeypatch.setattr(train, "load_target", load_target)
    target = target_directory(tmp_path / "target")
    argv = ["--config", str(ROOT / "configs/train/smollm2_eagle3.toml"), "--out", str(tmp_path / "out")]
    for change in (f'target="{target}"', *changes):
        argv += ["--set", change]
    error = told(train.main, argv, capsys)
    for word in named.split(" .* "):
        assert word in error


def tiny_training(place: Path) -> list[str]:
    """The flags of a run that could be made; its target's weights are not there."""
    target, text = target_directory(place / "target"), tiny_run.records(place / "text", 8)
    lines = [f'target = "{target}"', "[data]", f'train = "{text}"', f'heldout = "{text}"', "length = 20", "anchors = 6"]
    lines += ["heldout_batches = 1", "heldout_anchors = 4", "[drafter]", "layers = 1", "target_layer_ids = [0]"]
    (place / "c.toml").write_text("\n".join([*lines, "mask_token_id = 1", "markov_rank = 4"]))
    return ["--config", str(place / "c.toml"), "--out", str(place / "out")]


def test_a_second_training_process_of_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock that another open file has is as another process's. Nothing of the folder is read or written before."""
    train = script("train")
    monkeypatch.setattr(train, "load_target", load_target)
    argv = tiny_training(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    with open(out / "lock", "w") as other:
        other.write("4711\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        error = told(train.main, argv, capsys)
    assert error == f"error: {out}: process 4711 is training here; wait for it, stop it, or take another folder\n"
    assert [path.name for path in out.iterdir()] == ["lock"]


def test_an_export_to_a_full_disk_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def __init__(self, *_: Any) -> None: ...

        def export(self, place: Path) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

    train = script("train")
    monkeypatch.setattr(train, "load_target", lambda name: None)
    monkeypatch.setattr(train, "Run", Full)
    (tmp_path / "out" / "checkpoints" / "1").mkdir(parents=True)
    assert train.main([*tiny_training(tmp_path), "--export-only", str(tmp_path / "drafter")]) == 3
    error = capsys.readouterr().err
    assert error == f"stopped: {tmp_path / 'drafter'}: no space left on the disk; make room and start again\n"


def test_the_configuration_of_a_target_needs_no_weights(tmp_path: Path) -> None:
    assert target_config(target_directory(tmp_path / "target")) == TARGET


@pytest.mark.parametrize(
    ("setting", "named"),
    [("order=4", "order must be one of 2, 3, found 4"), ("least=0", "least must be 1 or more, found 0")],
)
def test_counting_ngrams_names_the_setting_and_what_it_may_be(
    setting: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(ROOT / "configs/ngram/smollm2.toml"), "--out", str(tmp_path), "--set", setting]
    assert named in told(script("count_ngrams").main, argv, capsys)


def test_an_export_needs_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made where ``--out`` was mistyped; it gave the untrained drafter of a new folder. What a kill left of
    a first checkpoint is none."""
    argv = ["--config", str(ROOT / "configs/train/smollm2_dspark.toml"), "--out", str(tmp_path / "typo")]
    argv += ["--export-only", str(tmp_path / "drafter")]
    error = told(script("train").main, argv, capsys)
    assert "--export-only: " in error and "typo holds no checkpoint" in error and not list(tmp_path.iterdir())
    (tmp_path / "typo" / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    assert "typo holds no checkpoint" in told(script("train").main, argv, capsys)
    assert not (tmp_path / "drafter").exists()
