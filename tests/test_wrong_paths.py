"""Paths that a command cannot read or write end in one line that names them, with the status of wrong input; other
errors of the operating system are raised."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.command_line import OF_A_PATH, exit_status, path_error
from dspark_jax.config_toml import load_toml
from dspark_jax.data.records import write_records
from dspark_jax.serve.__main__ import _describe
from dspark_jax.train.config import TrainConfig
from tests.test_refused_early import ROOT, load_target, script, tiny_training, told

Output = pytest.CaptureFixture[str]
WITH_FOLDER = ("train", "prepare_data", "evaluate", "calibrate", "count_ngrams", "cache_teacher")


@pytest.fixture(autouse=True)
def uncached() -> Any:
    """Commands set the cache of programs."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("name", [*WITH_FOLDER, "train_within"])
def test_a_directory_is_no_configuration(name: str, tmp_path: Path, capsys: Output) -> None:
    argv = ["--config", str(tmp_path), "--out", str(tmp_path / "out")]
    argv += ["--seconds", "9"] if name == "train_within" else []
    assert (
        told(script(name).main, argv, capsys) == f"error: {tmp_path}: cannot be read as a TOML file (Is a directory)\n"
    )


def test_a_file_below_a_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(ValueError, match=r"f/c.toml: cannot be read as a TOML file \(Not a directory\)"):
        load_toml(tmp_path / "f" / "c.toml", TrainConfig)


def test_a_run_is_not_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    train = script("train")
    monkeypatch.setattr(train, "load_target", load_target)
    argv = tiny_training(tmp_path)
    out = tmp_path / "out"
    out.write_text("notes")
    assert told(train.main, argv, capsys) == f"error: {out}: exists, and is no directory\n"
    assert out.read_text() == "notes"
    error = told(train.main, [*argv[:-1], str(out / "below")], capsys)
    assert error == f"error: {out / 'below'}: not a directory, or below a file\n"


def test_an_export_does_not_replace_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    train = script("train")
    place = tmp_path / "drafter"
    place.write_text("notes")
    monkeypatch.setattr(train, "load_target", lambda name: None)
    monkeypatch.setattr(train, "Run", lambda *_: SimpleNamespace(export=lambda place: place.mkdir(exist_ok=True)))
    (tmp_path / "out" / "checkpoints" / "1").mkdir(parents=True)
    argv = [*tiny_training(tmp_path), "--export-only", str(place)]
    assert told(train.main, argv, capsys) == f"error: {place}: exists, and is no directory\n"


def test_prompts_do_not_replace_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    prepare = script("prepare_data")
    monkeypatch.setattr(prepare, "unread_prompts", lambda *_, **__: [[1, 2]])
    place = tmp_path / "prompts"
    place.mkdir()
    config = ROOT / "configs/train/smollm2_dspark.toml"
    argv = ["--prompts-of", str(config), "--set", "data.first=1", "--out", str(place)]
    assert told(prepare.main, argv, capsys) == f"error: {place}: a directory, where a file is expected\n"
    assert not list(tmp_path.glob("*.tmp")) and not list(place.iterdir())


def test_ngrams_are_not_kept_in_a_file(tmp_path: Path, capsys: Output) -> None:
    write_records(tmp_path / "text", [([1, 2, 3], [True] * 3)], vocab_size=8)
    out = tmp_path / "out"
    out.write_text("notes")
    argv = ["--config", str(ROOT / "configs/ngram/smollm2.toml"), "--set", f"records={tmp_path / 'text'}"]
    assert f"{out}: exists, and is no directory" in told(
        script("count_ngrams").main, [*argv, "--out", str(out)], capsys
    )


def test_arrays_of_a_case_do_not_replace_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    parity = script("parity")
    monkeypatch.setattr(parity, "load_case", lambda *_: None)
    monkeypatch.setattr(parity, "compute", lambda case: {"a": np.zeros(2)})
    monkeypatch.setattr("sys.argv", ["parity.py", "case", "--out", str(tmp_path)])
    error = told(lambda _: parity.main(), [], capsys)
    assert error == f"error: {tmp_path}: a directory, where a file is expected\n"


def test_a_model_that_is_not_ours_to_read_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def locked(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/locked/config.json")

    generate = script("generate")
    monkeypatch.setattr(generate, "load_target", locked)
    error = told(generate.main, ["--model", "/models/locked", "--prompt", "hi"], capsys)
    assert error == "error: /models/locked/config.json: permission denied\n"
    with pytest.raises(PermissionError) as caught:
        locked()
    assert _describe(caught.value) == "/models/locked/config.json: permission denied", "the server says the same"


@pytest.mark.parametrize("number", OF_A_PATH)
def test_every_error_of_a_path_is_wrong_input(number: int, capsys: Output) -> None:
    def act() -> None:
        raise OSError(number, "of the operating system", "a", None, "b" if number == errno.EISDIR else None)

    assert exit_status(act) == 2
    name = "b" if number == errno.EISDIR else "a"  # where a file was to be moved to
    assert capsys.readouterr().err == f"error: {name}: {OF_A_PATH[number]}\n"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "reset"),
        PermissionError(errno.EPERM, "a signal to another's process"),
        OSError(errno.EIO, "a broken disk", "file"),
        OSError("in a library's words"),
    ],
)
def test_errors_that_are_not_about_a_path_that_was_named_wrongly_are_raised(error: OSError) -> None:
    def act() -> None:
        raise error

    assert path_error(error) is None
    with pytest.raises(type(error)):
        exit_status(act)
