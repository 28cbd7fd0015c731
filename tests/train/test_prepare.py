"""Training data from prompts: cleaned, answered by the engine, resumable; or ShareGPT's own answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.config_toml import load_toml
from dspark_jax.data import sharegpt
from dspark_jax.data.records import Records
from dspark_jax.testing import ScriptedTarget
from dspark_jax.train import prepare as module
from dspark_jax.train.prepare import ANSWERS, PrepareConfig, SamplingConfig, prepare, recommended

VOCAB = 128
ROOT = Path(__file__).resolve().parents[2]


class Tokenizer:
    """One token a character, in one way for each of the template's uses."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        text = "".join(f"<{m['role'][0]}>{m['content']}$\n" for m in messages)
        text += "<a>" if options.get("add_generation_prompt") else ""
        return text if options.get("tokenize") is False else [ord(c) for c in text]

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def target() -> ScriptedTarget:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(VOCAB + 1, VOCAB)), jnp.float32)
    return ScriptedTarget(table, max_positions=64, tokenizer=Tokenizer())


def texts(folder: Path) -> list[tuple[str, str]]:
    """(prompt, learnt part) of every record."""
    records = Records(folder)
    found = []
    for i in range(len(records)):
        batch = records.batch([i], 64)
        ids, mask = batch.tokens[0, : batch.lengths[0]], batch.loss_mask[0, : batch.lengths[0]]
        found.append(tuple("".join(map(chr, ids[which])) for which in (~mask, mask)))
    return found


def test_prompts_are_cleaned_and_answered_and_a_killed_preparation_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """Of eight lines one repeats another, one belongs to an evaluation and one has no room for an answer. With half of
    the answers lost, only those are made again, and the records are the same."""
    prompts = ["one", "two", "ONE", "name three rivers", "x" * 30, "three", "four", "five"]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps({"turns": [p]}) + "\n" for p in prompts))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "Name three rivers."}\n')
    config = PrepareConfig(
        target="scripted",
        source=str(source),
        answers="regenerate",
        max_tokens=32,
        min_answer_tokens=8,
        heldout=2,
        sampling=SamplingConfig(temperature=0.7),
        max_num_seqs=2,
        keep_away=(tmp_path / "eval.jsonl",),
    )
    assert prepare(config, target(), tmp_path / "out") == {"heldout": 2, "train": 3}
    found = texts(tmp_path / "out" / "heldout") + texts(tmp_path / "out" / "train")
    assert sorted(p.lower() for p, _ in found) == sorted(
        f"<u>{p}$\n<a>" for p in ("one", "two", "three", "four", "five")
    )
    assert all(len(p) + len(a) == 32 for p, a in found)
    meta = Records(tmp_path / "out" / "train").meta
    assert meta["answers"] == "regenerate" and meta["sampling"]["temperature"] == 0.7

    path = tmp_path / "out" / ANSWERS
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:3]) + b'{"i": 4, "to')
    asked = []
    request = module.Request
    monkeypatch.setattr(module, "Request", lambda *a, **o: asked.append(a[0]) or request(*a, **o))
    prepare(config, target(), tmp_path / "out")
    assert len(asked) == 3 and texts(tmp_path / "out" / "heldout") + texts(tmp_path / "out" / "train") == found

    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        prepare(dataclasses.replace(config, seed=1), target(), tmp_path / "out")


def test_answers_of_the_source_are_kept_and_sets_share_no_conversation(tmp_path: Path, monkeypatch: Any) -> None:
    """Parts of conversation a are held out: its other part is in no training set."""
    parts = [("a", "q1"), ("b", "q2"), ("a", "q3"), ("c", "q4")]
    talks = [(n, [{"role": "user", "content": q}, {"role": "assistant", "content": "answer"}]) for n, q in parts]
    monkeypatch.setattr(sharegpt, "find_file", lambda: tmp_path)
    monkeypatch.setattr(sharegpt, "read", lambda path: [])
    monkeypatch.setattr(sharegpt, "shuffled", lambda entries, seed, max_characters: iter(talks))
    config = PrepareConfig(target="scripted", max_tokens=40, min_answer_tokens=5, heldout=1)
    monkeypatch.setattr(module, "recommended", lambda config: Sampling())
    assert prepare(config, target(), tmp_path / "out") == {"heldout": 1, "train": 2}
    assert [p for p, _ in texts(tmp_path / "out" / "train")] == ["<u>q2$\n<a>", "<u>q4$\n<a>"]
    assert texts(tmp_path / "out" / "heldout") == [("<u>q1$\n<a>", "answer$")]


def test_the_recommended_sampling_is_the_configurations_or_the_targets(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2}'
    )
    config = PrepareConfig(target=str(tmp_path))
    assert recommended(config) == Sampling(0.6, 20, 0.95)
    assert recommended(PrepareConfig(target=str(tmp_path), sampling=SamplingConfig(0.2))) == Sampling(0.2)
    (tmp_path / "generation_config.json").unlink()
    assert recommended(config) == Sampling()


def test_shipped_configurations_load_and_mistakes_are_named() -> None:
    path = ROOT / "configs" / "data" / "smollm2.toml"
    assert load_toml(path, PrepareConfig, ["limit=5"]).limit == 5
    for change, why in (
        ("source='x.jsonl'", None),
        ("answers='keep'", None),
        ("answers='invent'", "answers must be one of"),
        ("heldout=0", "counts must be positive"),
        ("sampling.top_p=2", "top_p must be"),
    ):
        if why is None:
            load_toml(path, PrepareConfig, [change])
            continue
        with pytest.raises(ValueError, match=why):
            load_toml(path, PrepareConfig, [change])
    with pytest.raises(ValueError, match="need answers = 'regenerate'"):
        load_toml(path, PrepareConfig, ["source='x.jsonl'", "answers='keep'"])
