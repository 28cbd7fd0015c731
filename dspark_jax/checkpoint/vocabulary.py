"""Vocabularies of a drafter and of its target: the d2t map, and heads padded to different widths.

In checkpoints ``d2t`` is an offset (target id = draft id + d2t[draft id]) and ``t2d`` a mask over the
target's vocabulary; here ``d2t`` always means the target ids themselves, ``[Vd]`` int32.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.checkpoint.restore import TensorSource
from dspark_jax.config import DrafterConfig

# Heads are padded to round numbers of rows: 151936 or 152064 for a tokenizer of 151669. A drafter this much
# wider than the tokenizer is no padding any more but belongs to another one.
MAX_PADDING_TOKENS = 4096


def read_d2t(source: TensorSource, config: DrafterConfig) -> np.ndarray | None:
    """Target ids ``[Vd]`` int32 of the draft vocabulary; None where the checkpoint has no map.

    Raises ValueError, naming what is wrong: a trimmed vocabulary without d2t; a wrong length or dtype; target
    ids out of range or listed twice; a t2d mask of another length, count or set of tokens.
    """
    names = set(source.names())
    where, vocab, draft_vocab = source.path, config.decoder.vocab_size, config.draft_vocab_size
    if "d2t" not in names:
        if config.trimmed or "t2d" in names:
            raise ValueError(f"{where}: a draft vocabulary of {draft_vocab} tokens needs the tensor d2t")
        return None
    offsets = source.read("d2t")
    if offsets.dtype.kind not in "iu" or offsets.shape != (draft_vocab,):
        raise ValueError(
            f"{where}: d2t must be {draft_vocab} integers (draft_vocab_size), found {offsets.dtype} of shape"
            f" {offsets.shape}"
        )
    ids = np.arange(draft_vocab, dtype=np.int64) + offsets.astype(np.int64)
    problem = _ids_problem(ids, vocab)
    if problem:
        plain = _ids_problem(offsets.astype(np.int64), vocab) is None
        hint = "; its values look like target ids, where an offset is expected (id - draft id)" if plain else ""
        raise ValueError(f"{where}: d2t {problem}{hint}")
    if "t2d" in names:
        _check_t2d(source, ids, vocab)
    return ids.astype(np.int32)


def _ids_problem(ids: np.ndarray, vocab: int) -> str | None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        i = int(outside[0])
        return f"maps draft id {i} to {int(ids[i])}, outside the target's vocabulary of {vocab}"
    unique, counts = np.unique(ids, return_counts=True)
    if unique.size < ids.size:
        return f"maps {int(counts.max())} draft ids to target id {int(unique[counts.argmax()])}"
    return None


def _check_t2d(source: TensorSource, ids: np.ndarray, vocab: int) -> None:
    mask = source.read("t2d")
    if mask.shape != (vocab,):
        raise ValueError(f"{source.path}: t2d must be a mask over {vocab} tokens, found shape {mask.shape}")
    mask = mask.astype(bool)
    if int(mask.sum()) != ids.size:
        raise ValueError(f"{source.path}: t2d marks {int(mask.sum())} tokens, d2t lists {ids.size}")
    if not mask[ids].all():
        unmarked = ids[~mask[ids]]
        raise ValueError(f"{source.path}: d2t lists target id {int(unmarked[0])}, which t2d does not mark")


def vocabulary_tensors(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors ``d2t`` (int64 offsets) and ``t2d`` (bool mask) of target ids ``[Vd]``.

    Raises ValueError where an id is out of range or occurs twice.
    """
    ids = np.asarray(ids, np.int64)
    problem = _ids_problem(ids, vocab_size)
    if problem:
        raise ValueError(f"d2t {problem}")
    mask = np.zeros(vocab_size, bool)
    mask[ids] = True
    return {"d2t": ids - np.arange(ids.size), "t2d": mask}


@dataclasses.dataclass(frozen=True)
class Refit:
    """How a drafter of one head width fits a target of another.

    Attributes:
        config: the drafter's config in the target's vocabulary.
        d2t: target ids ``[Vd]`` int32, None for the whole vocabulary.
        rows: ``[Vd]`` draft rows of the checkpoint that are kept, in order.
    """

    config: DrafterConfig
    d2t: np.ndarray | None
    rows: np.ndarray


def refit(
    config: DrafterConfig, d2t: np.ndarray | None, vocab_size: int, tokenizer_length: int | None, source: str
) -> Refit:
    """Brings a drafter to the target's ``vocab_size`` where the two only differ by padding rows.

    Rows past the tokenizer's length never name a token, so they may be cut from a wider drafter; a narrower
    one becomes a draft vocabulary of its own (an identity d2t). Without a tokenizer the widths must be equal.

    Raises ValueError, naming both widths, where the difference is more than padding.
    """
    mine = config.decoder.vocab_size
    ids = np.arange(config.draft_vocab_size, dtype=np.int32) if d2t is None else d2t
    if mine == vocab_size:
        return Refit(config, d2t, np.arange(ids.size))
    length = tokenizer_length
    if length is None or mine < length or mine > max(vocab_size, length) + MAX_PADDING_TOKENS:
        known = "no tokenizer to compare with" if length is None else f"{length} in its tokenizer"
        raise ValueError(
            f"{source}: the drafter's vocabulary has {mine} tokens, the target's {vocab_size} ({known}):"
            " it is a drafter of another target"
        )
    rows = np.flatnonzero(ids < vocab_size)
    ids = ids[rows]
    whole = d2t is None and ids.size == vocab_size
    fitted = dataclasses.replace(
        config,
        decoder=dataclasses.replace(config.decoder, vocab_size=vocab_size),
        draft_vocab_size=int(ids.size),
        trimmed=not whole,
    )
    return Refit(fitted, None if whole else ids, rows)
