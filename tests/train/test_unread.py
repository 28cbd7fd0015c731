"""Prompts for calibration come from conversations that training has not read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.data.prompts import read_prompts
from dspark_jax.data.records import write_records
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.unread import unread_prompts
from tests.test_refused_early import script
from tests.train import tiny_run


def folders(tmp_path: Path) -> TrainConfig:
    """Held out: a prompt of 2 tokens, the same again, one without an answer. Training text: record 0 has too little to
    learn and is not counted, 1 is read, 2 is too long, 3 and 4 are free."""

    def record(prompt: list[int], answer: int) -> tuple[list[int], list[bool]]:
        return prompt + [9] * answer, [False] * len(prompt) + [True] * answer

    held = [record([1, 2], 3), record([1, 2], 4), record([3], 0)]
    train = [record([4], 1), record([5], 3), record([6] * 5, 3), record([7, 8], 3), record([8], 3)]
    for name, records in (("held", held), ("text", train)):
        write_records(tmp_path / name, records, vocab_size=16)
    base = tiny_run.config(tmp_path)
    data = dataclasses.replace(base.data, train=tmp_path / "text", heldout=tmp_path / "held", least_learnt=2, first=1)
    return dataclasses.replace(base, data=data)


def test_prompts_are_the_first_turns_of_held_out_records_and_of_those_behind_the_cursor(tmp_path: Path) -> None:
    config = folders(tmp_path)
    assert unread_prompts(config, 10, 4) == [[1, 2], [7, 8], [8]]
    assert unread_prompts(config, 2, 5) == [[1, 2], [6] * 5]
    read = dataclasses.replace(config, data=dataclasses.replace(config.data, first=4))
    assert unread_prompts(read, 10, 4) == [[1, 2]]
    with pytest.raises(ValueError, match="held and .*text behind record 4: no first turn of 1 tokens or fewer"):
        unread_prompts(read, 10, 1)


def test_the_command_writes_a_prompt_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    prepare_data = script("prepare_data")
    monkeypatch.setattr(prepare_data, "load_toml", lambda path, schema, changes: folders(tmp_path))
    monkeypatch.setattr(prepare_data, "begin_logging", lambda: None)
    out = tmp_path / "prompts" / "chat.jsonl"
    argv = ["--prompts-of", "train.toml", "--prompts", "2", "--longest", "4", "--out", str(out)]
    assert prepare_data.main(argv) == 0 and "chat.jsonl: 2 prompts" in capsys.readouterr().out
    assert [prompt.ids for prompt in read_prompts(out)] == [(1, 2), (7, 8)]
    assert json.loads(out.read_text().splitlines()[0]) == {"prompt_ids": [1, 2]}
