"""A disk that is really full: a small tmpfs. Everything stops cleanly, and goes on where room was made.

Mounting needs privileges; where they are missing these tests skip and say so (what is simulated is in test_loop.py).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.calibrate import Calibration
from dspark_jax.data import sharegpt
from dspark_jax.data.records import Records
from dspark_jax.train import prepare as module
from dspark_jax.train.cached_teacher import build
from dspark_jax.train.loop import Run
from dspark_jax.train.prepare import ANSWERS, PrepareConfig, SamplingConfig, prepare
from dspark_jax.whole_file import DiskFull
from tests.train import test_prepare, tiny_run


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``disk("256k")``: an empty file system of that size."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        if shutil.which("mount") is None:
            pytest.skip("no mount command")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """A file that takes all the room there is."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    assert shutil.disk_usage(place).free == 0
    return filler


def test_a_preparation_stops_on_a_full_disk_and_is_whole_with_more_room(
    tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of ShareGPT's own answers, more of them than the disk holds: an error that says so; the set that could
    not be finished does not open. With room it is the set that a larger disk gets."""
    answer = "answer " * 200
    talks = [
        (str(i), [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": answer}]) for i in range(60)
    ]
    monkeypatch.setattr(sharegpt, "find_file", lambda: tmp_path)
    monkeypatch.setattr(sharegpt, "read", lambda path: [])
    monkeypatch.setattr(sharegpt, "shuffled", lambda entries, seed, max_characters: iter(talks))
    config = PrepareConfig(target="scripted", max_tokens=1500, heldout=1, sampling=SamplingConfig())
    target, small = test_prepare.target(), disk("192k")  # the training set takes 250 kB
    with pytest.raises(DiskFull, match="no space left on the disk; .* Make room and start again"):
        prepare(config, target, small)
    assert len(Records(small / "heldout")) == 1
    with pytest.raises(FileNotFoundError, match="no token records here, missing .*meta"):
        Records(small / "train")
    subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
    assert prepare(config, target, small) == prepare(config, target, tmp_path / "large") == {"heldout": 1, "train": 59}
    for name in ("tokens.bin", "mask.bin", "offsets.npy"):
        assert (small / "train" / name).read_bytes() == (tmp_path / "large" / "train" / name).read_bytes()


@pytest.mark.slow
def test_answers_made_before_the_disk_was_full_are_not_made_again(
    tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills behind the third answer. What is there stays and is read, whatever half a line the disk took."""
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(30)))
    config = PrepareConfig(
        target="scripted", source=str(source), answers="regenerate", max_tokens=60, min_answer_tokens=4, heldout=2,
        sampling=SamplingConfig(0.7), max_num_seqs=2,
    )  # fmt: skip
    target, small = test_prepare.target(), disk("64k")
    append, done = module.LineFile.append, []

    def counted(self: Any, line: Any) -> None:
        append(self, line)
        if "tokens" in line:
            done.append(line["i"])
            if len(done) == 3:
                fill(small)

    monkeypatch.setattr(module.LineFile, "append", counted)
    with pytest.raises(DiskFull, match="answers made so far are kept"):
        prepare(config, target, small)
    known = (small / ANSWERS).read_bytes().splitlines(keepends=True)
    whole = [json.loads(line)["i"] for line in known[1:] if line.endswith(b"\n")]
    assert whole[:3] == done[:3] and len(whole) < 30, "a page holds about 20 lines"
    (small / "filler").unlink()
    before = len(done)
    assert prepare(config, target, small) == prepare(config, target, tmp_path / "large") == {"heldout": 2, "train": 28}
    assert sorted([*whole, *done[before : before + 30 - len(whole)]]) == list(range(30))
    for name in ("tokens.bin", "mask.bin"):
        assert (small / "train" / name).read_bytes() == (tmp_path / "large" / "train" / name).read_bytes()


@pytest.mark.slow
def test_a_run_stops_on_a_full_disk_and_ends_like_one_that_had_room(
    tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 cannot be saved: the checkpoint of step 2 is whole. With room made, the run ends with the parameters,
    moments and metrics of one that never stopped, bit for bit. Starting again while the disk is still full stops the
    same way and harms nothing."""
    config, target = tiny_run.config(tmp_path), tiny_run.target()
    Run(config, target, tmp_path / "whole").run()
    small = disk("8m")
    run = Run(config, target, small / "run")
    next_batch = run._next_batch

    def fills() -> Any:
        if int(run.state.step) == 2:
            fill(small)
        return next_batch()

    monkeypatch.setattr(run, "_next_batch", fills)
    with pytest.raises(DiskFull, match="no space left on the disk; the checkpoint of step 2 is whole"):
        run.run()
    with pytest.raises(DiskFull, match="the checkpoint of step 2 is whole"):
        Run(config, target, small / "run").run()
    (small / "filler").unlink()
    again = Run(config, target, small / "run")
    assert int(again.state.step) == 2
    again.run()
    unbroken = Run(config, target, tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, again.state, unbroken.state)

    def lines(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("time", "seconds_per_step")} for line in found]

    assert [line for line in lines(small / "run") if "ce" in line] == [
        line for line in lines(tmp_path / "whole") if "ce" in line
    ]


def test_an_installed_calibration_stays_as_it_was(disk: Callable[[str], Path]) -> None:
    small = disk("64k")
    Calibration(np.full(7, 2.0)).save(small / "calibration.json")
    fill(small)
    with pytest.raises(OSError, match="No space left"):
        Calibration(np.full(7, 3.0)).save(small / "calibration.json")
    assert Calibration.load(small / "calibration.json").temperature[0] == 2.0
    assert sorted(path.name for path in small.iterdir()) == ["calibration.json", "filler"]


def test_cached_teacher_states_are_whole_as_far_as_the_disk_went(
    tmp_path: Path, disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 2 records, 2.5 kB each, on a disk of six pages: some are written, then it is full. With room the rest
    is made and nothing anew."""
    from dspark_jax.train import cached_teacher

    monkeypatch.setattr(cached_teacher, "SHARD_RECORDS", 2)
    base = tiny_run.config(tmp_path)
    config = dataclasses.replace(base, drafter=dataclasses.replace(base.drafter, bigram_start=False))
    small = disk("24k")
    with pytest.raises(OSError, match="No space left"):
        build(config, tiny_run.target(), small, 12)
    assert not list(small.glob("*.tmp"))
    kept = {p.name: p.stat().st_mtime_ns for p in small.glob("*.bin")}
    subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
    assert build(config, tiny_run.target(), small, 12) == 12
    listed = json.loads((small / "index.json").read_text())["shards"]
    assert len(listed) == 6 and 1 <= len(kept) < 6
    unchanged = [name for name, when in kept.items() if (small / name).stat().st_mtime_ns == when]
    assert len(unchanged) >= len(kept) - 1  # the last one may have missed its line in the index
