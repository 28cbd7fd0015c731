"""Conversations to token ids and loss masks, through the target's own chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

Message = dict[str, str]
ROLES = ("system", "developer", "user", "human", "assistant", "model")
"""What templates call who speaks, on the first line of a turn."""

Piece = tuple[str, bool]
"""A part of a rendered conversation, and whether it is an answer."""


def passages(tokenizer: Any, messages: Sequence[Message]) -> list[list[Piece]]:
    """The rendered conversation as passages of ``(text, is an answer)`` pieces in order, every answer in one of them.

    An answer begins behind the generation prompt and ends with its end-of-turn token, which is to be learnt too;
    what the template puts behind that (a line break) belongs to the next prompt. The pieces are tokenised one by
    one, because that is what happens when a model answers: the prompt's tokens never merge with the answer's.

    Most templates render a turn alike whatever follows, and make one passage. Others show it in another way once the
    user has spoken again (Qwen3 drops what a model thought before its answer): there a new passage begins, with all
    that stands before the next answer as a model would then read it. Earlier answers in it are no answers any more:
    each is learnt once, as the model writes it.

    Raises ValueError where a template does not render an answer behind its own generation prompt.
    """
    found: list[list[Piece]] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not whole.startswith(prompt):
            raise ValueError(
                "this chat template rewrites earlier turns or its generation prompt when the answer comes; answers "
                "cannot be told apart"
            )
        if not found or not prompt.startswith(done):
            found.append([])
            done = ""
        answer = whole[len(prompt) :].rstrip("\n")
        found[-1] += [(prompt[len(done) :], False), (answer, True)]
        done = prompt + answer
    return found


def encode(tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> list[tuple[list[int], list[bool]]]:
    """Ids and loss mask (True on answers, their end-of-turn token included) of every passage, each cut to
    ``max_tokens``. Raises ValueError as ``passages`` does."""
    return [_encode(tokenizer, passage, max_tokens) for passage in passages(tokenizer, messages)]


def _encode(tokenizer: Any, passage: Sequence[Piece], max_tokens: int) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    for text, learn in passage:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [learn] * len(new)
        if len(ids) >= max_tokens:
            break
    return ids[:max_tokens], mask[:max_tokens]


def chat_texts(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """The texts that stand between the special tokens of a rendered conversation, without the names of who speaks. The
    system's, which is often the template's own, is left out."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    special |= {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    speaker = ""
    for between, part in groupby(ids, key=special.__contains__):
        if between:
            continue
        text = tokenizer.decode(list(part), skip_special_tokens=True).strip()
        first, _, rest = text.partition("\n")
        if first.strip().lower() in ROLES:
            speaker, text = first.strip().lower(), rest.strip()
        if text and speaker != "system":
            yield text
