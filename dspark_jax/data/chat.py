"""Conversations to token ids and loss masks, through the target's own chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, str]


def pieces(tokenizer: Any, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    """The rendered conversation as ``(text, is an answer)`` pieces, in order.

    An answer begins behind the generation prompt and ends with its end-of-turn token, which is to be learnt too;
    what the template puts behind that (a line break) belongs to the next prompt. The pieces are tokenised one by
    one, because that is what happens when a model answers: the prompt's tokens never merge with the answer's.
    """
    done = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not whole.startswith(prompt):
            raise ValueError("this chat template rewrites earlier turns; answers cannot be told apart")
        yield prompt[done:], False
        answer = whole[len(prompt) :].rstrip("\n")
        yield answer, True
        done = len(prompt) + len(answer)


def encode(tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> tuple[list[int], list[bool]]:
    """Ids and loss mask (True on answers, their end-of-turn token included), cut to ``max_tokens``."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, learn in pieces(tokenizer, messages):
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [learn] * len(new)
        if len(ids) >= max_tokens:
            break
    return ids[:max_tokens], mask[:max_tokens]
