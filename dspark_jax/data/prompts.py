"""Prompts from JSONL files, or rows of a data set: ``turns``, OpenAI ``messages``, ShareGPT's ``conversations``,
``prompt`` text or ``prompt_ids``."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dspark_jax.data.chat import Message

LOG = logging.getLogger("dspark_jax.data")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "system": "system"}
"""Roles of ShareGPT's ``from``."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One line of a prompt file: messages to be answered, or token ids as they stand."""

    line: int  # 1-based, in its file
    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    later: tuple[str, ...] = ()  # the user's further turns, where the line has ``turns``

    def encode(self, tokenizer: Any) -> tuple[int, ...]:
        """Token ids, the generation prompt of the chat template included.

        Raises ValueError for messages without a tokenizer.
        """
        if self.ids:
            return self.ids
        if tokenizer is None:
            raise ValueError(f"line {self.line}: text, but the target has no tokenizer: give prompt_ids")
        ids = tokenizer.apply_chat_template(list(self.messages), add_generation_prompt=True, return_dict=False)
        return tuple(map(int, ids))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` usable lines of a file (None: all).

    Of ``turns`` the first is the prompt; of ``messages`` everything up to the last one that is no answer. A broken
    line is named in the log and passed over.

    Raises:
        FileNotFoundError: no such file. ValueError: no line can be used; the first broken one is named.
    """
    place = Path(path)
    if not place.is_file():
        raise FileNotFoundError(f"{path}: no such prompt file")
    with open(place, encoding="utf-8", errors="replace") as file:
        lines = ((number, partial(parse_prompt, line, number)) for number, line in enumerate(file, 1) if line.strip())
        return list(_usable(str(path), lines, limit))


def read_rows(rows: Iterable[Mapping[str, Any]], name: str) -> list[Prompt]:
    """The usable rows of a data set called ``name``; like ``read_prompts``, rows counted from 1."""
    return list(_usable(name, ((i, partial(parse_record, row, i)) for i, row in enumerate(rows, 1)), None))


def _usable(name: str, entries: Iterable[tuple[int, Callable[[], Prompt]]], limit: int | None) -> Iterator[Prompt]:
    problems: list[str] = []
    found = 0
    for number, parse in entries:
        if limit is not None and found >= limit:
            break
        try:
            prompt = parse()
        except ValueError as error:
            problems.append(f"{name}:{number}: {error}")
            LOG.warning("%s; the line is passed over", problems[-1])
            continue
        found += 1
        yield prompt
    if not found:
        raise ValueError(problems[0] if problems else f"{name}: no prompts in this file")


def parse_prompt(line: str, number: int) -> Prompt:
    """One line. Raises ValueError saying what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"an object expected, found {type(record).__name__}")
    return parse_record(record, number)


def parse_record(record: Mapping[str, Any], number: int) -> Prompt:
    """A parsed line, or a row of a data set (keys without a value do not count). Raises ValueError as above."""
    record = {key: value for key, value in record.items() if value is not None}
    if "prompt_ids" in record:
        ids = record["prompt_ids"]
        if not _is_list(ids, int) or any(isinstance(i, bool) or i < 0 for i in ids):
            raise ValueError("prompt_ids must be a list of token ids that is not empty")
        return Prompt(number, ids=tuple(ids))
    if "messages" in record:
        return Prompt(number, messages=_messages(record["messages"]))
    if "conversations" in record:
        return Prompt(number, messages=_messages(_sharegpt_turns(record["conversations"])))
    if "turns" in record:
        turns = record["turns"]
        if not _is_list(turns, str) or not turns[0].strip():
            raise ValueError("turns must be a list of texts that is not empty")
        return Prompt(number, messages=({"role": "user", "content": turns[0]},), later=tuple(turns[1:]))
    if isinstance(record.get("prompt"), str) and record["prompt"].strip():
        return Prompt(number, messages=({"role": "user", "content": record["prompt"]},))
    raise ValueError("turns, messages, prompt or prompt_ids expected")


def _sharegpt_turns(value: Any) -> list[dict[str, Any]]:
    if not _is_list(value, dict):
        raise ValueError("conversations must be a list of objects that is not empty")
    return [{"role": ROLES.get(turn.get("from", "")), "content": turn.get("value")} for turn in value]


def _messages(value: Any) -> tuple[Message, ...]:
    if not _is_list(value, dict):
        raise ValueError("messages must be a list of objects that is not empty")
    for message in value:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError("every message needs role and content, both texts")
    kept = [{"role": m["role"], "content": m["content"]} for m in value]
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not kept:
        raise ValueError("messages hold nothing to answer")
    return tuple(kept)


def _is_list(value: Any, kind: type) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(entry, kind) for entry in value)
    )
