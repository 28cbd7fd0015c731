"""Prompts of the training text's own kind that training does not read: what a drafter is calibrated on."""

from __future__ import annotations

import logging

import numpy as np

from dspark_jax.data.records import Records
from dspark_jax.train.config import TrainConfig

LOG = logging.getLogger("dspark_jax.data")


def unread_prompts(config: TrainConfig, count: int, longest: int) -> list[list[int]]:
    """First user turns, as token ids with their generation prompt, of records that a run does not learn from.

    The held-out records come first, then the training records behind ``data.first``, which is counted as training
    counts it. Left out are prompts of more than ``longest`` tokens and those that were taken already.

    Raises:
        FileNotFoundError: no records. ValueError: none of them has such a prompt.
    """
    data, heldout = config.data, Records(config.data.heldout)
    train = Records(data.train)
    behind = train.usable(data.length, data.least_learnt)[data.first :]
    found: dict[tuple[int, ...], None] = {}
    for records, ids in ((heldout, np.arange(len(heldout))), (train, behind)):
        for i in ids:
            if len(found) == count:
                break
            begin, end = records.offsets[i], records.offsets[i + 1]
            answer = np.flatnonzero(records.loss_mask[begin:end])
            if len(answer) and 0 < answer[0] <= longest:
                found[tuple(records.tokens[begin : begin + answer[0]].tolist())] = None
    if not found:
        raise ValueError(
            f"{data.heldout} and {data.train} behind record {data.first}: no first turn of {longest} tokens or fewer"
        )
    if len(found) < count:
        LOG.warning("%d prompts of %d tokens or fewer were found, %d were asked for", len(found), longest, count)
    return [list(ids) for ids in found]
