"""The folder of a run: what may change, what a kill leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_jax.train.config import OptimConfig
from dspark_jax.train.folder import Metrics, check_same, hold
from dspark_jax.whole_file import is_disk_full, write_whole
from tests.train import tiny_run


def test_a_folder_of_an_older_version_is_continued_with_the_defaults(tmp_path: Path) -> None:
    """Settings that its config.json does not know count as their defaults; another value is another run."""
    config = tiny_run.config(tmp_path)
    check_same(config, tmp_path)
    old = json.loads((tmp_path / "config.json").read_text())
    del old["optim"]["ema_decay"], old["loss"]["chunks"], old["devices"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    check_same(config, tmp_path, write=False)
    averaged = dataclasses.replace(config, optim=dataclasses.replace(config.optim, ema_decay=0.9))
    with pytest.raises(ValueError, match=r"holds another run: optim\.ema_decay: 0\.0 -> 0\.9$"):
        check_same(averaged, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == old
    longer = dataclasses.replace(config, optim=dataclasses.replace(config.optim, total_steps=9), devices=4)
    check_same(longer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["total_steps"] == 9


def test_a_bigram_start_that_played_no_part_does_not_stop_an_older_run(tmp_path: Path) -> None:
    """With the whole vocabulary it was passed over, and is now refused: such a run goes on without it."""
    config = tiny_run.config(tmp_path)
    shape = dataclasses.replace(config.drafter, draft_vocab=0, always=(), bigram_start=False)
    config = dataclasses.replace(config, drafter=shape)
    check_same(config, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"bigram_start": false', '"bigram_start": true'))
    check_same(config, tmp_path)
    assert '"bigram_start": false' in path.read_text()


def test_metrics_go_on_behind_the_checkpoint(tmp_path: Path) -> None:
    """Step 3 and a line that was cut off are written again; a run without a checkpoint starts anew."""
    metrics = Metrics(tmp_path, 0)
    for step in (0, 1, 2, 3):
        metrics.append({"step": step})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "to')
    Metrics(tmp_path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    Metrics(tmp_path, 0)
    assert path.read_text() == ""


def test_tensorboard_files_are_optional(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboardX", None)
        Metrics(tmp_path / ".", 0, tensorboard=True).append({"step": 1, "total": 1.0})
    assert "tensorboardX is not installed" in caplog.text
    pytest.importorskip("tensorboardX")
    metrics = Metrics(tmp_path, 0, tensorboard=True)
    metrics.append({"step": 1, "total": 1.0, "heldout": {"width_3": {"tau": 1.5, "accept": [0.1]}}})
    metrics.close()
    assert sum(p.stat().st_size for p in (tmp_path / "tensorboard").iterdir()) > 0


def test_tensorboard_shows_the_steps_that_metrics_keep(tmp_path: Path, monkeypatch: Any) -> None:
    """A run that goes on from step 4 keeps its line and writes the next one: what is purged begins behind it."""
    purged: list[int] = []
    writer = SimpleNamespace(SummaryWriter=lambda folder, purge_step: purged.append(purge_step))
    monkeypatch.setitem(sys.modules, "tensorboardX", writer)
    for step in (0, 4):
        Metrics(tmp_path, step, tensorboard=True)
    assert purged == [0, 5]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_known_from_whatever_it_became() -> None:
    inner = OSError(errno.ENOSPC, "x")
    outer = RuntimeError("save failed")
    outer.__cause__ = inner
    assert is_disk_full(inner) and is_disk_full(outer) and is_disk_full(ValueError("... No space left on device ..."))
    assert not is_disk_full(OSError(errno.EACCES, "x")) and not is_disk_full(None)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="ema_decay"):
        OptimConfig(ema_decay=1.0)


def test_a_folder_has_one_training_process(tmp_path: Path) -> None:
    """The process that has it may ask again, also where the folder was deleted since; another one is refused by name.
    A lock belongs to an open file: one that is opened here and now is as another process's."""
    folder = tmp_path / "run"
    hold(folder)
    hold(folder)
    assert (folder / "lock").read_text() == f"{os.getpid()}\n"
    with open(folder / "lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.rmtree(folder)
    hold(folder)
    with open(folder / "lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "lock").write_text("12345\n")
    with open(taken / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"taken: process 12345 is training here; wait for it, stop it, or take"):
            hold(taken)
    hold(taken)  # what is left of a process that has ended holds nobody up
