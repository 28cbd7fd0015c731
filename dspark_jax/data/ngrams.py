"""Bigram and trigram tables of training text: the baseline that a trained drafter has to beat.

Probabilities are interpolated with absolute discounting (Ney, Essen, Kneser 1994): of every count ``DISCOUNT`` is
taken away and goes to the law of the shorter context, so that a trigram backs off to the bigram and that to the
unigram. Of every context the K likeliest successors are kept.

C trigram contexts, K successors, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.data.records import Records
from dspark_jax.whole_file import write_whole

METHOD = "ngram"
TABLES, CONFIG = "ngram.npz", "config.json"
DISCOUNT = 0.75
ORDERS = (2, 3)
_PART = 50_000  # contexts whose candidates are sorted at once


@dataclasses.dataclass(frozen=True)
class NgramConfig:
    """What ``config.json`` says.

    Attributes:
        order: 2 or 3, tokens of an n-gram.
        successors: K; 1: the drafts are certain, each context has one successor.
        block_size: drafts of a block where nobody says how many.
    """

    vocab_size: int
    order: int = 3
    successors: int = 32
    block_size: int = 7
    method: str = METHOD

    def __post_init__(self) -> None:
        if self.order not in ORDERS or min(self.successors, self.block_size, self.vocab_size) < 1:
            raise ValueError(f"order must be 2 or 3, successors, block_size and vocab_size positive, found {self}")


@dataclasses.dataclass(frozen=True)
class NgramTables:
    """Successors by falling probability; where there are fewer than K the rest has log-probability -inf."""

    bigram_ids: np.ndarray  # [V, K] int32, by the last token
    bigram_log_p: np.ndarray  # [V, K] float16
    first: np.ndarray | None = None  # [V + 1] int32: contexts of token a before the last are first[a]..first[a + 1]
    second: np.ndarray | None = None  # [C] int32: their last tokens, ascending for each a
    trigram_ids: np.ndarray | None = None  # [C, K] int32
    trigram_log_p: np.ndarray | None = None  # [C, K] float16


def count(records: Records, config: NgramConfig, *, least: int = 2) -> NgramTables:
    """Tables of the learnt tokens of ``records`` (a loss mask of 1; what stands before them may be a prompt).

    Args:
        least: a trigram context that was seen less often is left to the bigram.

    Raises ValueError where no token is learnt, or a token lies beyond the vocabulary.
    """
    if least < 1:
        raise ValueError(f"least must be positive, found {least}")
    tokens = np.asarray(records.tokens, np.int64)
    if len(tokens) and tokens.max() >= config.vocab_size:
        raise ValueError(f"{records.path}: token {tokens.max()} is beyond the vocabulary of {config.vocab_size}")
    place = np.arange(len(tokens)) - np.repeat(records.offsets[:-1], np.diff(records.offsets))  # in its record
    learnt = np.asarray(records.loss_mask, bool)
    if not (learnt & (place >= 1)).any():
        raise ValueError(f"{records.path}: no learnt token that follows another one")
    v, k = config.vocab_size, config.successors
    unigram = np.bincount(tokens[learnt], minlength=v) / learnt.sum()
    top = np.argsort(-unigram, kind="stable")[:k]

    at = np.flatnonzero(learnt & (place >= 1))
    pairs, pair_counts = np.unique(tokens[at - 1] * v + tokens[at], return_counts=True)
    context, successor = np.divmod(pairs, v)
    seen, start = np.unique(context, return_index=True)
    ids, p, pair_p = _smoothed(start, successor, pair_counts, unigram[successor], np.tile(top, (len(seen), 1)),
                               np.tile(unigram[top], (len(seen), 1)), k)  # fmt: skip
    bigram_ids, bigram_p = np.tile(_wide(top, k), (v, 1)), np.tile(_wide(unigram[top], k), (v, 1))
    bigram_ids[seen], bigram_p[seen] = ids, p
    bigrams = bigram_ids.astype(np.int32), _log(bigram_p)
    if config.order == 2:
        return NgramTables(*bigrams)

    at = np.flatnonzero(learnt & (place >= 2))
    triples, counts = np.unique((tokens[at - 2] * v + tokens[at - 1]) * v + tokens[at], return_counts=True)
    context, successor = np.divmod(triples, v)
    seen, start, which = np.unique(context, return_index=True, return_inverse=True)
    kept = np.bincount(which, counts, len(seen)) >= least
    inside = kept[which]
    context, successor, counts = context[inside], successor[inside], counts[inside]
    seen, start = np.unique(context, return_index=True)
    last = seen % v
    lower = pair_p[np.searchsorted(pairs, (context % v) * v + successor)]
    ids, p, _ = _smoothed(start, successor, counts, lower, bigram_ids[last], bigram_p[last], k)
    first = np.searchsorted(seen, np.arange(v + 1) * v).astype(np.int32)
    return NgramTables(*bigrams, first, last.astype(np.int32), ids.astype(np.int32), _log(p))


def _smoothed(
    start: np.ndarray,
    successor: np.ndarray,
    counts: np.ndarray,
    lower: np.ndarray,
    lower_ids: np.ndarray,
    lower_p: np.ndarray,
    k: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interpolated laws of C contexts, and of all N pairs of a context and a successor seen behind it.

    Args:
        start: ``[C]`` first pair of each context. successor, counts: ``[N]``. lower: ``[N]`` probability of the
            successor behind the shorter context. lower_ids, lower_p: ``[C, K]`` the shorter context's likeliest.

    Returns:
        ids ``[C, K]`` and probabilities ``[C, K]`` of the likeliest, and of the pairs ``[N]``.
    """
    ends = np.append(start[1:], len(successor))
    of = np.repeat(np.arange(len(start)), ends - start)
    total = np.add.reduceat(counts, start) if len(start) else np.zeros(0)
    left = DISCOUNT * (ends - start) / np.maximum(total, 1)  # the share of the shorter context
    own = (counts - DISCOUNT) / total[of] + left[of] * lower
    ids, p = np.zeros((len(start), k), np.int64), np.zeros((len(start), k))
    for begin in range(0, len(start), _PART):
        end = min(begin + _PART, len(start))
        part = slice(start[begin], ends[end - 1])
        width = lower_ids.shape[1]
        row = np.concatenate([of[part] - begin, np.repeat(np.arange(end - begin), width)])
        token = np.concatenate([successor[part], lower_ids[begin:end].ravel()])
        law = np.concatenate([own[part], (left[begin:end, None] * lower_p[begin:end]).ravel()])
        # A successor that was seen comes twice; its own entry is the larger one.
        order = np.lexsort((-law, token, row))
        row, token, law = row[order], token[order], law[order]
        fresh = np.append(True, (row[1:] != row[:-1]) | (token[1:] != token[:-1]))
        row, token, law = row[fresh], token[fresh], law[fresh]
        order = np.lexsort((token, -law, row))
        row, token, law = row[order], token[order], law[order]
        rank = np.arange(len(row)) - np.searchsorted(row, np.arange(end - begin))[row]
        best = rank < k
        ids[begin + row[best], rank[best]], p[begin + row[best], rank[best]] = token[best], law[best]
    return ids, p, own


def _wide(values: np.ndarray, k: int) -> np.ndarray:
    return np.append(values, np.zeros(k - len(values), values.dtype))


def _log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p).astype(np.float16)


def save(folder: str | Path, config: NgramConfig, tables: NgramTables, source: Mapping[str, Any] | None = None) -> None:
    """Writes ``ngram.npz``, then ``config.json`` with its checksum, each as a whole; cut off in between, a folder does
    not load."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    arrays = {name: value for name, value in dataclasses.asdict(tables).items() if value is not None}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(place / TABLES, buffer.getvalue())
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    content = {**dataclasses.asdict(config), "sha256": digest, "source": dict(source or {})}
    write_whole(place / CONFIG, json.dumps(content, indent=2) + "\n")


def is_ngram(raw: Mapping[str, Any]) -> bool:
    """A parsed ``config.json`` is that of n-gram tables."""
    return raw.get("method") == METHOD


def load(folder: str | Path) -> tuple[NgramConfig, NgramTables]:
    """Reads what ``save`` wrote. Raises FileNotFoundError, or ValueError for damaged or unfitting files, named."""
    place = Path(folder)
    for name in (CONFIG, TABLES):
        if not (place / name).is_file():
            raise FileNotFoundError(f"{place / name}: no such file; scripts/count_ngrams.py makes it")
    raw = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    try:
        config = NgramConfig(**{field.name: raw[field.name] for field in dataclasses.fields(NgramConfig)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{place / CONFIG}: not the configuration of n-gram tables ({error})") from None
    content = (place / TABLES).read_bytes()
    if hashlib.sha256(content).hexdigest() != raw.get("sha256"):
        raise ValueError(f"{place / TABLES}: damaged (its checksum is not that of {CONFIG}); count again")
    try:
        with np.load(io.BytesIO(content)) as arrays:
            tables = NgramTables(**{name: arrays[name] for name in arrays.files})
    except (TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{place / TABLES}: not n-gram tables ({error})") from None
    wrong = list(_misfits(config, tables))
    if wrong:
        raise ValueError(f"{place / TABLES}: does not fit {CONFIG}: {'; '.join(wrong)}")
    return config, tables


def _misfits(config: NgramConfig, tables: NgramTables) -> Iterator[str]:
    shape = (config.vocab_size, config.successors)
    if tables.bigram_ids.shape != shape or tables.bigram_log_p.shape != shape:
        yield f"bigrams are {tables.bigram_ids.shape}, expected {shape}"
    if (config.order == 3) != (tables.trigram_ids is not None):
        yield f"order is {config.order}, trigrams are {'there' if tables.trigram_ids is not None else 'absent'}"
