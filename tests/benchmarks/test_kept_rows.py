"""Rows of a comparison that outlive their runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import kept_rows
import numpy as np
import pytest
from kept_rows import KeptRow

from dspark_jax.evaluate import report
from dspark_jax.evaluate.acceptance import Sample
from dspark_jax.evaluate.decode import Trace

SUITES = {"a": 4, "b": 3}
DRAFTS = {"mine": 3, "reference": 5}


def traces(seed: int, drafts: int) -> list[Trace]:
    rng = np.random.default_rng(seed)
    found = []
    for suite, count in SUITES.items():
        for index in (0, *range(2, count + 1)):  # prompt 1 of every set was too long
            committed = tuple(int(x) for x in 1 + rng.integers(0, drafts + 1, 12))
            tokens = tuple(int(x) for x in rng.integers(5, 50, 1 + sum(committed)))
            found.append(Trace(suite, index, tokens, committed, (drafts,) * 12, "length", 1.5, 9, f"{suite}{index}"))
    return found


def evaluated(folder: Path, name: str, seed: int, **header: Any) -> tuple[KeptRow, list[Trace]]:
    """A row as an evaluation leaves it, written in another order and with a prompt more than was asked for, of sets in
    which one prompt was left out."""
    found = traces(seed, DRAFTS[name])
    lines = [*reversed(found), dataclasses.replace(found[0], index=99)]
    records = folder / "records" / "greedy" / f"{name}.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    head = {"target": "t", "drafter": {"files": name}, "decode": {"max_new_tokens": 9}, **header}
    records.write_text("".join(json.dumps(x) + "\n" for x in [head, *map(dataclasses.asdict, lines)]))
    rows = [{"name": name, "histogram": [0] * (DRAFTS[name] + 1), "equal_texts": 7, "prompts": 7}]
    results = {"suites": SUITES, "runs": {"greedy": rows}}
    return KeptRow.of(name, {"steps": 3}, folder, results, {"commit": "c"}), found


def test_rows_read_from_their_files_measure_as_the_records_do(tmp_path: Path) -> None:
    """Accepted lengths, intervals and ratios to the reference, which is measured first wherever it stands."""
    rows, texts = zip(*(evaluated(tmp_path, name, seed) for seed, name in enumerate(DRAFTS)), strict=True)
    for row in rows:
        row.save(tmp_path / "kept")
        assert KeptRow.load(tmp_path / "kept" / f"{row.name}.json") == row
    read = [KeptRow.load(tmp_path / "kept" / f"{name}.json") for name in DRAFTS]
    groups = {"a": "a", "b": "b"}
    entries = kept_rows.measure(read, "reference", groups, 200)["greedy"]
    assert [entry["name"] for entry in entries] == ["reference", "mine"]

    by_name = {row.name: text for row, text in zip(reversed(rows), reversed(texts), strict=True)}
    samples = {name: Sample(found, DRAFTS[name], groups) for name, found in by_name.items()}
    for mine, wanted in zip(entries, report.measure(samples, by_name, 200), strict=True):
        assert mine.pop("equal_texts") == 7
        wanted.pop("tokens_per_s")
        assert mine == wanted
    alone = kept_rows.measure(read[:1], "reference", groups, 200)["greedy"]
    assert "tau_ratio" in entries[1] and "tau_ratio" not in alone[0]


def test_a_prompt_that_was_left_out_costs_no_other_one(tmp_path: Path) -> None:
    """Of set a, prompts 0, 2, 3 and 4 were decoded: four, though the last has number 4."""
    row, _ = evaluated(tmp_path, "mine", 0)
    assert [(t.suite, t.index) for t in row.traces["greedy"]] == [
        *(("a", i) for i in (0, 2, 3, 4)),
        *(("b", i) for i in (0, 2, 3)),
    ]


def test_rows_decoded_otherwise_are_not_compared(tmp_path: Path) -> None:
    """Another number of tokens, fewer prompts, another prompt in the same place."""
    reference, _ = evaluated(tmp_path, "reference", 0)
    mine, _ = evaluated(tmp_path, "mine", 1, decode={"max_new_tokens": 10})
    with pytest.raises(ValueError, match=r"decoded otherwise \(greedy: decode\.max_new_tokens: 9 -> 10\)"):
        kept_rows.measure([reference, mine], "reference", {}, 10)
    mine, _ = evaluated(tmp_path, "mine", 1)
    first, *others = mine.traces["greedy"]
    fewer = dataclasses.replace(mine, traces={"greedy": others})
    with pytest.raises(ValueError, match="1 prompts that only one of them has"):
        kept_rows.measure([reference, fewer], "reference", {}, 10)
    other = dataclasses.replace(mine, traces={"greedy": [dataclasses.replace(first, prompt="else"), *others]})
    with pytest.raises(ValueError, match="1 prompts of other content, the first a 0"):
        kept_rows.measure([reference, other], "reference", {}, 10)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"prompts": {"greedy": [[1]]}}'])
def test_a_file_that_is_no_row_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: not a row of a comparison"):
        KeptRow.load(path)
