"""Chat formatting and ShareGPT's cut-off file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax.data import sharegpt
from dspark_jax.data.chat import encode, pieces


class _ChatML:
    """One token a character; a template with a line break behind every turn."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}$\n" for m in messages)
        return text + ("<a>" if add_generation_prompt else "")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text]}


TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "ok"},
]


def test_answers_end_with_their_end_of_turn_token() -> None:
    assert list(pieces(_ChatML(), TURNS)) == [
        ("<u>hi$\n<a>", False),
        ("yo$", True),
        ("\n<u>so$\n<a>", False),
        ("ok$", True),
    ]


def test_only_answers_are_learnt() -> None:
    ids, mask = encode(_ChatML(), TURNS, 100)
    assert "".join(chr(i) for i, learn in zip(ids, mask, strict=True) if learn) == "yo$ok$"
    ids, mask = encode(_ChatML(), TURNS, 12)
    assert len(ids) == len(mask) == 12 and mask[-1]


def test_a_template_that_rewrites_is_refused() -> None:
    class Rewriting(_ChatML):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return f"{len(messages)}" + super().apply_chat_template(messages, **options)

    with pytest.raises(ValueError, match="rewrites earlier turns"):
        list(pieces(Rewriting(), TURNS))


def _entry(name: str, *turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in turns]}


def test_a_file_cut_in_mid_string_gives_its_whole_conversations(tmp_path: Path) -> None:
    entries = [_entry(f"c{i}", ("human", "q"), ("gpt", "a")) for i in range(3)]
    text = json.dumps(entries, indent=2)
    path = tmp_path / "cut.json"
    path.write_text(text[: text.index("c2") + 40])
    assert sharegpt.read(path) == entries[:2]
    path.write_text(text)
    assert sharegpt.read(path) == entries
    path.write_text("[{")
    with pytest.raises(ValueError, match="not a list"):
        sharegpt.read(path)


def test_conversations_alternate_and_end_with_an_answer() -> None:
    entry = _entry("x", ("gpt", "late"), ("human", " q "), ("gpt", "a"), ("human", "r"), ("human", "s"))
    assert sharegpt.conversation(entry, 1000) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert sharegpt.conversation(_entry("y", ("human", "q")), 1000) == []


def test_repeats_and_other_scripts_are_left_out() -> None:
    entries = [
        _entry("a_0", ("human", "q"), ("gpt", "a")),
        _entry("b_3", ("human", "q"), ("gpt", "a")),
        _entry("c_1", ("human", "что это"), ("gpt", "это текст")),
        _entry("d_2", ("human", "other"), ("gpt", "a")),
    ]
    found = list(sharegpt.shuffled(entries, 0))
    assert len(found) == 2 and {"d"} < {name for name, _ in found} <= {"a", "b", "d"}
    assert found == list(sharegpt.shuffled(entries, 0))
