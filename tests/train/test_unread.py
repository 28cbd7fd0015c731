"""Prompts for calibration come from conversations that training has not read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.data.prompts import read_prompts
from dspark_jax.data.records import Records, write_records
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.read_text import ReadText
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
    data = dataclasses.replace(base.data, train=tmp_path / "text", heldout=tmp_path / "held", least_learnt=2)
    return dataclasses.replace(base, data=data)


def test_prompts_are_the_first_turns_of_held_out_records_and_of_those_behind_the_cursor(tmp_path: Path) -> None:
    data = folders(tmp_path).data
    assert unread_prompts(data, 10, 4, read=1) == [[1, 2], [7, 8], [8]]
    assert unread_prompts(data, 2, 5, read=1) == [[1, 2], [6] * 5]
    assert unread_prompts(data, 10, 4, read=4) == [[1, 2]]
    with pytest.raises(ValueError, match="held and .*text behind record 4: no first turn of 1 tokens or fewer"):
        unread_prompts(data, 10, 1, read=4)


def test_another_part_of_a_conversation_that_was_read_is_no_unread_prompt(tmp_path: Path) -> None:
    data = folders(tmp_path).data
    records = [([k, 9, 9], [False, True, True], name) for k, name in ((5, "a"), (6, "b"), (7, "a"), (8, "c"))]
    write_records(data.train, records, vocab_size=16)
    assert unread_prompts(data, 10, 4, read=1) == [[1, 2], [6], [8]]


def test_without_a_cursor_only_held_out_prompts_are_taken(tmp_path: Path) -> None:
    """Where the run began is not where it has come to: its own first records were read."""
    data = dataclasses.replace(folders(tmp_path).data, first=1)
    assert unread_prompts(data, 1, 4, read=None) == [[1, 2]]
    with pytest.raises(
        ValueError, match=r"held has 1 of the 2 prompts, .*text the run .*--drafter.*data.first=RECORDS"
    ):
        unread_prompts(data, 2, 4, read=None)


def test_the_command_writes_a_prompt_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    prepare_data = script("prepare_data")
    monkeypatch.setattr(prepare_data, "load_toml", lambda path, schema, changes: folders(tmp_path))
    monkeypatch.setattr(prepare_data, "begin_logging", lambda: None)
    out = tmp_path / "prompts" / "chat.jsonl"
    argv = ["--prompts-of", "train.toml", "--prompts", "2", "--longest", "4", "--out", str(out)]
    assert prepare_data.main(argv) == 2 and not out.exists()
    assert "which records of" in capsys.readouterr().err
    first = dataclasses.replace(folders(tmp_path).data, first=1)
    monkeypatch.setattr(
        prepare_data, "load_toml", lambda path, schema, changes: dataclasses.replace(folders(tmp_path), data=first)
    )
    assert (
        prepare_data.main([*argv, "--set", " data . first = 1"]) == 0
        and "chat.jsonl: 2 prompts" in capsys.readouterr().out
    )
    assert [prompt.ids for prompt in read_prompts(out)] == [(1, 2), (7, 8)]
    assert json.loads(out.read_text().splitlines()[0]) == {"prompt_ids": [1, 2]}


def test_the_drafter_says_what_was_read_and_of_another_text_it_says_nothing(
    tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any
) -> None:
    prepare_data = script("prepare_data")
    config = folders(tmp_path)
    monkeypatch.setattr(prepare_data, "load_toml", lambda path, schema, changes: config)
    monkeypatch.setattr(prepare_data, "begin_logging", lambda: None)
    records, data, drafter = Records(config.data.train), config.data, tmp_path / "drafter"
    known = ReadText(records, records.usable(data.length, data.least_learnt), data).identity(2)
    drafter.mkdir()
    out = tmp_path / "chat.jsonl"
    argv = ["--prompts-of", "train.toml", "--prompts", "9", "--longest", "9", "--drafter", str(drafter)]
    argv += ["--out", str(out)]

    def told(training: dict[str, Any]) -> str:
        (drafter / "config.json").write_text(json.dumps({"training": training}))
        out.unlink(missing_ok=True)
        status = prepare_data.main(argv)
        assert out.is_file() == (status == 0)
        return out.read_text() if status == 0 else capsys.readouterr().err

    behind = "".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([1, 2], [7, 8], [8]))
    assert told(known) == behind and not caplog.messages[:-1]
    assert told({"records": 2}) == behind and any("not of which text" in line for line in caplog.messages)
    assert "does not say how many records" in told({})
    assert "is not the text that" in told({**known, "text": "another"})
    assert told({**known, "text": "another", "earlier": [known]}) == behind
    for wrong in ([*argv, "--set", "data.first=1"], argv[2:]):
        with pytest.raises(SystemExit):
            prepare_data.main(wrong)
