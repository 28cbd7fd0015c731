"""Prompt sets as token ids with their seeds: the same tasks for every drafter."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from dspark_jax.data.prompts import read_prompts
from dspark_jax.evaluate.config import DecodeConfig, Suite

LOG = logging.getLogger("dspark_jax.evaluate")


@dataclasses.dataclass(frozen=True)
class Task:
    """One prompt to continue."""

    suite: str
    index: int  # in its set
    ids: tuple[int, ...]
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What a record of it is found by."""
        return self.suite, self.index


def load_tasks(suites: tuple[Suite, ...], target: Any, decode: DecodeConfig) -> list[Task]:
    """The prompts of all sets, in order. One that is too long for ``max_new_tokens`` more is left out, and logged.

    Args:
        target: its tokenizer, vocabulary and window count.

    Raises:
        FileNotFoundError, ValueError: a file is missing, has no usable prompt, or token ids that the target does not
            have; the message names it.
    """
    window = min(decode.max_model_len, target.max_positions)
    tasks: list[Task] = []
    for suite in suites:
        before = len(tasks)
        for index, prompt in enumerate(read_prompts(suite.path, suite.prompts)):
            try:
                ids = prompt.encode(target.tokenizer)
            except ValueError as error:
                raise ValueError(f"{suite.path}: {error}") from None
            if max(ids, default=0) >= target.vocab_size:
                raise ValueError(
                    f"{suite.path}:{prompt.line}: token id {max(ids)}, but the target has {target.vocab_size} tokens; "
                    "prompt_ids are those of one tokenizer"
                )
            if len(ids) + decode.max_new_tokens > window:
                LOG.warning("%s:%d: %d tokens are too long, left out", suite.path, prompt.line, len(ids))
                continue
            tasks.append(Task(suite.name, index, ids, decode.seed + index))
        if len(tasks) == before:
            raise ValueError(f"{suite.path}: no prompt leaves room for {decode.max_new_tokens} tokens in {window}")
    return tasks
