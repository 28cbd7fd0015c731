"""Token records: what is written is read back, and nothing is read that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.data.records import META, TOKENS, Records, write_records

TEXT = [([5, 6, 7, 8], [False, True, True, True]), ([9], [True]), ([1, 2, 3], [False, False, True])]


def test_a_batch_is_cut_and_padded(tmp_path: Path) -> None:
    assert write_records(tmp_path, TEXT, vocab_size=300, meta={"source": "hand"}) == 3
    records = Records(tmp_path)
    assert len(records) == 3 and records.meta["source"] == "hand"
    batch = records.batch([0, 2], 3)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7], [1, 2, 3]])
    np.testing.assert_array_equal(batch.loss_mask, [[False, True, True], [False, False, True]])
    batch = records.batch([1], 3)
    np.testing.assert_array_equal(batch.tokens, [[9, 0, 0]])
    np.testing.assert_array_equal(batch.loss_mask, [[True, False, False]])
    assert batch.lengths.tolist() == [1]


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    write_records(tmp_path, [([151_000], [True])], vocab_size=151_936)
    assert Records(tmp_path).batch([0], 1).tokens.tolist() == [[151_000]]


def test_usable_counts_only_what_a_cut_record_keeps(tmp_path: Path) -> None:
    write_records(tmp_path, TEXT, vocab_size=300)
    records = Records(tmp_path)
    assert records.usable(4, 2).tolist() == [0]
    assert records.usable(2, 1).tolist() == [0, 1]
    assert records.usable(4, 4).tolist() == []


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no token records here"):
        Records(tmp_path)
    write_records(tmp_path, [], vocab_size=300)
    with pytest.raises(ValueError, match="empty data set"):
        Records(tmp_path)
    write_records(tmp_path, TEXT, vocab_size=300)
    (tmp_path / TOKENS).write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="offsets end at 8"):
        Records(tmp_path)


def test_every_record_knows_its_source_or_none_does(tmp_path: Path) -> None:
    """A folder that is written again without sources does not keep the old ones."""
    triples = [(*pair, name) for pair, name in zip(TEXT, ("line 3", "line 1", "über"), strict=True)]
    write_records(tmp_path, triples, vocab_size=300)
    assert Records(tmp_path).sources == ["line 3", "line 1", "über"]
    assert Records(tmp_path).meta["conversations"] == 3
    write_records(tmp_path, TEXT, vocab_size=300)
    assert Records(tmp_path).sources is None
    with pytest.raises(ValueError, match="1 of 3 records name their source"):
        write_records(tmp_path, [triples[0], *TEXT[1:]], vocab_size=300)


def test_records_past_the_end_are_refused(tmp_path: Path) -> None:
    write_records(tmp_path, TEXT, vocab_size=300)
    with pytest.raises(IndexError, match="record 3"):
        Records(tmp_path).batch([2, 3], 4)


def test_an_interrupted_folder_does_not_open(tmp_path: Path) -> None:
    write_records(tmp_path, TEXT, vocab_size=300)
    with pytest.raises(ValueError, match="record 0"):
        write_records(tmp_path, [([1, 2], [True])], vocab_size=300)
    assert not (tmp_path / META).exists()


def test_a_folder_stays_as_it_is_where_no_record_can_be_made(tmp_path: Path) -> None:
    """A source that is not there is found out when its first record is asked for."""
    write_records(tmp_path, TEXT, vocab_size=300)

    def missing() -> Iterator[tuple[list[int], list[bool]]]:
        raise FileNotFoundError("p.jsonl: no such prompt file")
        yield [], []

    with pytest.raises(FileNotFoundError, match=r"p\.jsonl"):
        write_records(tmp_path, missing(), vocab_size=300)
    assert Records(tmp_path).batch([0], 4).tokens.tolist() == [[5, 6, 7, 8]]
