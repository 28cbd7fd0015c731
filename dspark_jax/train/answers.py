"""Conversations answered anew by the target, turn by turn, through the serving engine.

Every answer is given to the questions and to the *new* answers before it, as a drafter will meet them. What the engine
has made is kept line by line, so that a killed preparation goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.config import Sampling
from dspark_jax.data.chat import Message
from dspark_jax.data.line_file import LineFile
from dspark_jax.data.prompts import Prompt
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.progress import Progress
from dspark_jax.targets import stop_ids

LOG = logging.getLogger("dspark_jax.data")


def asks(messages: Sequence[Message], turns: int) -> list[list[Message]]:
    """What stands before each of the first ``turns`` answers of a conversation, the last one without an answer too."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group][:turns]


@dataclasses.dataclass
class Talk:
    """A conversation under way. ``ids`` end with an open question, or with the last answer where none is open."""

    asks: list[list[Message]]
    max_tokens: int
    least: int  # an answer has room for so many tokens, or the conversation ends before it
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    answers: int = 0
    rewritten: bool = False  # the chat template changes earlier turns: nothing can follow

    def open(self, tokenizer: Any) -> bool:
        """Appends the next question. False where none is left, or no room for its answer; nothing is changed then."""
        if self.answers >= len(self.asks):
            return False
        ask = self.asks[self.answers]
        if self.answers == 0:
            new: Sequence[int] = Prompt(0, messages=tuple(ask)).encode(tokenizer)
        else:
            # The answer's own tokens stay; what the template puts between it and the next one is tokenised alone.
            answered = tokenizer.apply_chat_template(self.messages, tokenize=False).rstrip("\n")
            whole = tokenizer.apply_chat_template([*self.messages, *ask], tokenize=False, add_generation_prompt=True)
            if not whole.startswith(answered):
                self.rewritten = True
                return False
            new = tokenizer(whole[len(answered) :], add_special_tokens=False)["input_ids"]
        if len(self.ids) + len(new) + self.least > self.max_tokens:
            return False
        self.messages += ask
        self.ids += new
        self.mask += [False] * len(new)
        return True

    def answer(self, tokens: Sequence[int], stops: Sequence[int], tokenizer: Any) -> bool:
        """Appends an answer. False where the conversation cannot go on: it was cut, not ended by a stop token."""
        self.ids += tokens
        self.mask += [True] * len(tokens)
        self.answers += 1
        ended = bool(tokens) and tokens[-1] in stops
        if ended and self.answers < len(self.asks):
            text = tokenizer.decode(list(tokens[:-1]), skip_special_tokens=True)
            self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return ended


def answer_all(
    talks: Sequence[Talk],
    target: Any,
    sampling: Sampling,
    file: LineFile,
    *,
    max_num_seqs: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Answers every conversation to its end, in place; each comes with its first question open.

    Lines of ``file`` are answers that are known already; new ones are written there.

    Plain decoding reads the seed's numbers by position, so an answer depends on what stands before it and not on its
    batch mates; all answers of conversation i have the seed ``seed + i``.

    Raises ValueError where a known answer was made to something else than stands before it now.
    """
    tokenizer, stops = target.tokenizer, stop_ids(target)
    known = {(line["i"], line.get("turn", 0)): line for line in file.lines}

    def resume(i: int) -> bool:
        """Appends what is known; True if a question is left open."""
        talk = talks[i]
        while (line := known.get((i, talk.answers))) is not None:
            if line.get("asked", mine := _digest(talk.ids)) != mine:  # older lines do not say
                raise ValueError(
                    f"{file.path}: answer {talk.answers + 1} of conversation {i} was made to something else than "
                    "stands before it now: the source, or what is kept away of it, has changed since. Give another "
                    "folder, or delete the file to have all answers made anew"
                )
            if not (talk.answer(line["tokens"], stops, tokenizer) and talk.open(tokenizer)):
                return False
        return True

    waiting = deque(i for i in range(len(talks)) if resume(i))
    if waiting:
        engine = _engine(target, max_num_seqs, max_tokens)
        running: dict[int, int] = {}
        total, made = sum(len(talk.asks) for talk in talks), sum(talk.answers for talk in talks)
        with Progress(total, "answers", done=made, unit="answer") as progress:
            while waiting or engine.has_work():
                while waiting and len(running) < 2 * max_num_seqs:
                    i = waiting.popleft()
                    ids = tuple(talks[i].ids)
                    limit = max_tokens - len(ids)
                    request = Request(ids, limit, sampling, seed=(seed + i) % 2**32, stop_token_ids=stops)
                    running[engine.submit(request)] = i
                for event in engine.step():
                    if event.result is None:
                        continue
                    i, tokens = running.pop(event.id), list(event.result.tokens)
                    talk = talks[i]
                    file.append({"i": i, "turn": talk.answers, "asked": _digest(talk.ids), "tokens": tokens})
                    progress.advance(1)
                    if talk.answer(tokens, stops, tokenizer) and talk.open(tokenizer):
                        waiting.append(i)
    rewritten = sum(talk.rewritten for talk in talks)
    if rewritten:
        LOG.warning("%d conversations end early: this chat template rewrites earlier turns", rewritten)


def _digest(ids: Sequence[int]) -> str:
    """Short hash of the tokens that an answer was made to."""
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()[:16]


def _engine(target: Any, max_num_seqs: int, max_tokens: int) -> Engine:
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=min(max_tokens + 1, target.max_positions),
        mode="none",
        slot_buckets=(max_num_seqs,),
    )
    engine = Engine(target, None, config)
    LOG.info("compiling")
    engine.warmup()
    return engine
