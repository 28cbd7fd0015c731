"""Chat formatting and ShareGPT's cut-off file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark_jax.data import sharegpt
from dspark_jax.data.chat import chat_texts, encode, passages


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
    assert passages(_ChatML(), TURNS) == [
        [("<u>hi$\n<a>", False), ("yo$", True), ("\n<u>so$\n<a>", False), ("ok$", True)]
    ]


def test_only_answers_are_learnt() -> None:
    ((ids, mask),) = encode(_ChatML(), TURNS, 100)
    assert "".join(chr(i) for i, learn in zip(ids, mask, strict=True) if learn) == "yo$ok$"
    ((ids, mask),) = encode(_ChatML(), TURNS, 12)
    assert len(ids) == len(mask) == 12 and mask[-1]


def test_a_template_that_rewrites_is_refused() -> None:
    class Rewriting(_ChatML):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return f"{len(messages)}" + super().apply_chat_template(messages, **options)

    with pytest.raises(ValueError, match="rewrites earlier turns"):
        passages(Rewriting(), TURNS)


class Thinking(_ChatML):
    """What was thought stands before an answer, and no more once the user speaks again."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [
            {**m, "content": "()" + m["content"]} if m["role"] == "assistant" and i > last else m
            for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, **options)


def test_a_template_that_drops_earlier_thoughts_makes_a_passage_for_each_answer_and_loses_no_text() -> None:
    """Of what the user said nothing is missing, and every answer is learnt once, as the model writes it."""
    three = [*TURNS, {"role": "user", "content": "bye"}, {"role": "assistant", "content": "ta"}]
    assert passages(Thinking(), three) == [
        [("<u>hi$\n<a>", False), ("()yo$", True)],
        [("<u>hi$\n<a>yo$\n<u>so$\n<a>", False), ("()ok$", True)],
        [("<u>hi$\n<a>yo$\n<u>so$\n<a>ok$\n<u>bye$\n<a>", False), ("()ta$", True)],
    ]
    first, second, _ = encode(Thinking(), three, 26)
    assert [len(ids) for ids, _ in (first, second)] == [15, 26]
    assert "".join(chr(i) for i, learn in zip(*second, strict=True) if learn) == "()"


QWEN = """{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{{- '<think>\n\n</think>\n\n' if m.role == 'assistant' and loop.index0 > last.user else '' }}
{{- m.content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""


def templated() -> PreTrainedTokenizerFast:
    """One token a character, ChatML's marks and a template in the manner of Qwen3's."""
    letters = Tokenizer(models.BPE({chr(i): i for i in range(128)}, []))
    letters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", bos_token="<|im_start|>")
    made.chat_template = QWEN
    return made


def test_a_jinja_template_in_the_manner_of_qwen3_loses_no_text() -> None:
    user, answer = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    thought = "<think>\n\n</think>\n\n"
    assert passages(templated(), TURNS) == [
        [(user.format("hi") + answer, False), (f"{thought}yo<|im_end|>", True)],
        [
            (f"{user.format('hi')}{answer}yo<|im_end|>\n{user.format('so')}{answer}", False),
            (f"{thought}ok<|im_end|>", True),
        ],
    ]


def test_the_texts_of_a_rendered_conversation_are_read_back_from_its_tokens() -> None:
    """Without the system's, the marks and the names of who speaks; also where these are marked themselves."""
    tokenizer = templated()
    talk = [{"role": "system", "content": "be kind"}, *TURNS[:2], {"role": "user", "content": "user\nmanual?"}]
    ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))["input_ids"]
    assert list(chat_texts(tokenizer, ids)) == ["hi", "yo", "user\nmanual?"]
    headed = "<|im_start|>system<|im_end|>\n\nbe kind<|im_end|><|im_start|>user<|im_end|>\n\nName three.<|im_end|>"
    assert list(chat_texts(tokenizer, tokenizer(headed)["input_ids"])) == ["Name three."]
    assert list(chat_texts(tokenizer, tokenizer("no template")["input_ids"])) == ["no template"]


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
