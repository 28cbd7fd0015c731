"""Prompt files: the four kinds of lines, and lines that are broken."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.data.prompts import parse_prompt, read_prompts


class Tokenizer:
    """Characters; the template shows roles."""

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, return_dict: bool) -> list[int]:
        assert add_generation_prompt and not return_dict
        return [ord(c) for c in "".join(f"<{m['role']}>{m['content']}" for m in messages)]


def shown(record: dict[str, Any]) -> str:
    return "".join(map(chr, parse_prompt(json.dumps(record), 1).encode(Tokenizer())))


def test_the_kinds_of_lines_become_prompts() -> None:
    """The first turn; messages without the answer that would be repeated; plain text; ids as they stand."""
    assert shown({"turns": ["one", "two"]}) == "<user>one"
    assert shown({"prompt": "one"}) == "<user>one"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    assert shown({"messages": chat}) == "<system>s<user>u"
    assert parse_prompt('{"prompt_ids": [3, 1]}', 1).encode(None) == (3, 1)
    with pytest.raises(ValueError, match="line 7: text, but the target has no tokenizer"):
        parse_prompt('{"prompt": "x"}', 7).encode(None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"turns": ["a"', "not valid JSON"),
        ("[1]", "an object expected, found list"),
        ('{"turns": []}', "turns must be"),
        ('{"turns": "abc"}', "turns must be"),
        ('{"turns": [1]}', "turns must be"),
        ('{"prompt_ids": [1, -2]}', "prompt_ids must be"),
        ('{"prompt_ids": [true]}', "prompt_ids must be"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing to answer"),
        ('{"question": "x"}', "turns, messages, prompt or prompt_ids expected"),
    ],
)
def test_a_broken_line_says_what_is_wrong(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_prompt(line, 1)


def test_a_broken_line_is_named_by_number_and_the_rest_is_used(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n{"prompt": "c"}\n')
    with caplog.at_level(logging.WARNING):
        found = read_prompts(path, 2)
    assert [p.line for p in found] == [1, 4]
    assert len(caplog.records) == 1 and "p.jsonl:3: not valid JSON" in caplog.text


def test_files_without_a_usable_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such prompt file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text('\n{"x": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: turns"):
        read_prompts(tmp_path / "bad.jsonl")
