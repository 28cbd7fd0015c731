"""Making and opening cached teacher states (``data/teacher_cache.py``) for a training configuration."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.data.records import Records
from dspark_jax.data.teacher_cache import TeacherCache, TeacherCacheWriter, records_digest
from dspark_jax.progress import Progress
from dspark_jax.targets import Target, weights_digest
from dspark_jax.train.config import TrainConfig, drafter_config
from dspark_jax.train.step import make_teacher_step

SHARD_RECORDS = 64
"""Records a shard; 64 of 384 tokens with 5 taps of 576 numbers are 170 MB."""


def header(config: TrainConfig, target: Target, records: Records) -> dict[str, Any]:
    """What teacher states belong to: text, target (name and weights), taps and length. Caches of earlier versions know
    weights by the last norm alone (``weights``), in bfloat16."""
    norm = np.ascontiguousarray(np.asarray(target.params["norm"]).astype(jnp.bfloat16)).tobytes()
    weights = hashlib.sha256(repr(dataclasses.astuple(target.config)).encode() + norm).hexdigest()[:16]
    return {
        "target": config.target,
        "weights": weights,
        "digest": weights_digest(target),
        "hidden_size": target.config.hidden_size,
        "taps": list(config.drafter.target_layer_ids),
        "length": config.data.length,
        "records": records_digest(records.tokens, records.offsets),
    }


def open_cache(config: TrainConfig, target: Target, records: Records) -> TeacherCache | None:
    """The cache that ``data.teacher_cache`` names, None where it names none. Raises what ``TeacherCache`` raises."""
    place = config.data.teacher_cache
    return None if place is None else TeacherCache(place, header(config, target, records))


def build(config: TrainConfig, target: Target, folder: str | Path, limit: int = 0) -> int:
    """Caches the states of ``limit`` usable training records (0: all) behind ``data.first``, in the order a run reads
    them.

    Shards that are there and sound are left as they are. Returns the number of records. Raises ValueError where the
    target has not the layers that are tapped or the tokens that are read, the folder holds states of something else or
    from another record on, or a state does not fit into float16.
    """
    drafter_config(config.drafter, target.config)  # says what the target does not have
    data = config.data
    records = Records(data.train).fitting(target.vocab_size)
    usable = records.usable(data.length, data.least_learnt).tolist()
    ids = usable[data.first :][: limit or len(usable)]
    if not ids:
        behind = f", behind the {data.first} that are passed over (data.first)" if data.first else ""
        raise ValueError(
            f"{data.train}: no record has {data.least_learnt} learnt tokens among its first {data.length}{behind}"
        )
    writer = TeacherCacheWriter(folder, header(config, target, records))
    if writer.begin not in (None, ids[0]):
        raise ValueError(
            f"{folder} holds teacher states from record {writer.begin} on, and data.first = {data.first} begins at "
            f"record {ids[0]}; give another folder"
        )
    step = make_teacher_step(config.drafter.target_layer_ids)
    with Progress(len(ids), "teacher states", unit="record") as progress:
        for number, begin in enumerate(range(0, len(ids), SHARD_RECORDS)):
            part = ids[begin : begin + SHARD_RECORDS]
            if not writer.has(number, part):
                states: list[np.ndarray] = []
                for at in range(0, len(part), data.batch):
                    some = part[at : at + data.batch]
                    # A short batch is filled up, so that all share one program.
                    batch = records.batch([*some, *[some[-1]] * (data.batch - len(some))], data.length)
                    final, taps = (np.asarray(x, np.float32) for x in step(target, jnp.asarray(batch.tokens)))
                    joined = np.concatenate([final, taps], axis=-1)
                    states += [joined[i, : batch.lengths[i]] for i in range(len(some))]
                writer.write(number, part, states)
            progress.advance(len(part))
    return len(ids)
