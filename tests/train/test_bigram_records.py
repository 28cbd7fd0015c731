"""A bigram start that reads no more text than its run trains on, what it cost, and who else trains in the folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.data.records import write_records
from dspark_jax.train.loop import Run
from tests.train import tiny_run

FIRST, COUNT = 2, 6


def begun(place: Path, later: int, count: int) -> Run:
    """A run from record ``FIRST`` on. From record ``FIRST + COUNT`` on, as in the first ``FIRST``, tokens go up (1) or
    down (-1): the same tokens, other bigrams."""
    base = tiny_run.config(place)
    rows = []
    for start in range(40):
        ids = [3 + (start + i) % (tiny_run.VOCAB - 4) for i in range(20)]
        mine = FIRST <= start < FIRST + COUNT
        rows.append((ids if mine else ids[::later], [True] * 20))
    text = place / f"text{later}"
    write_records(text, rows, vocab_size=tiny_run.VOCAB)
    config = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, train=text, first=FIRST),
        drafter=dataclasses.replace(base.drafter, bigram_records=count),
    )
    return Run(config, tiny_run.target(), place / f"run{later}_{count}")


def test_a_bigram_start_of_some_records_knows_those_alone(tmp_path: Path) -> None:
    """Two texts that differ outside of the records of a run begin it alike, and unlike where all are read."""
    for count, alike in ((COUNT, True), (0, False)):
        up, down = (begun(tmp_path, later, count) for later in (1, -1))
        np.testing.assert_array_equal(up.d2t, down.d2t)
        assert all(np.array_equal(up.params["markov"][k], down.params["markov"][k]) for k in ("w1", "w2")) == alike


def test_a_start_writes_down_what_it_cost_and_needs_its_folder_alone(tmp_path: Path, monkeypatch: Any) -> None:
    run = begun(tmp_path, 1, COUNT)
    monkeypatch.setattr(run, "evaluate", dict)
    with open(run.folder / "lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="process unknown is training here"):
            run.run()
    assert not (run.folder / "environment.jsonl").exists()
    run._begin()
    (line,) = map(json.loads, (run.folder / "environment.jsonl").read_text().splitlines())
    assert 0 < line["bigram_start_cpu_seconds"] < 60
