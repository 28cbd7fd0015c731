"""Prompts of the training text's own kind that training does not read: what a drafter is calibrated on."""

from __future__ import annotations

import logging

import numpy as np

from dspark_jax.data.records import Records
from dspark_jax.train.config import DataConfig

LOG = logging.getLogger("dspark_jax.data")


def unread_prompts(data: DataConfig, count: int, longest: int, *, read: int | None) -> list[list[int]]:
    """First user turns, as token ids with their generation prompt, of records that a run does not learn from.

    The held-out records come first, then the training records behind the first ``read`` usable ones. Left out are
    prompts of more than ``longest`` tokens, those that were taken already and those of conversations that the run has
    read another part of.

    Args:
        data: of the run; its ``first`` says where the run began, not where it has come to, and is not looked at.
        count: prompts wanted; fewer are a warning.
        read: usable training records that the run has read; None: not known, and training records are not taken.

    Raises:
        FileNotFoundError: no records. ValueError: none of them has such a prompt; or the held-out ones have too few,
            and ``read`` is not known.
    """
    heldout = Records(data.heldout)
    found: dict[tuple[int, ...], None] = {}

    def take(records: Records, ids: np.ndarray) -> None:
        names, begun = records.sources, set[str]()
        for i in ids:
            if len(found) == count:
                break
            if names is not None:
                if names[i] in begun:  # a later part of a conversation: not its first turn
                    continue
                begun.add(names[i])
            begin, end = records.offsets[i], records.offsets[i + 1]
            answer = np.flatnonzero(records.loss_mask[begin:end])
            if len(answer) and 0 < answer[0] <= longest:
                found[tuple(records.tokens[begin : begin + answer[0]].tolist())] = None

    take(heldout, np.arange(len(heldout)))
    if len(found) < count:
        if read is None:
            raise ValueError(
                f"{data.heldout} has {len(found)} of the {count} prompts, and which records of {data.train} the run "
                "has not read is not known: name its drafter (--drafter), or how many records it has read (--set "
                "data.first=RECORDS), or ask for fewer prompts"
            )
        train = Records(data.train)
        usable, names = train.usable(data.length, data.least_learnt), train.sources
        behind = usable[read:]
        if names is not None:  # a later part of a conversation begins with what was read of it
            seen = {names[i] for i in usable[:read]}
            behind = np.asarray([i for i in behind if names[i] not in seen], int)
        take(train, behind)
    if not found:
        raise ValueError(
            f"{data.heldout} and {data.train} behind record {read}: no first turn of {longest} tokens or fewer"
        )
    if len(found) < count:
        LOG.warning("%d prompts of %d tokens or fewer were found, %d were asked for", len(found), longest, count)
    return [list(ids) for ids in found]
