"""Training data from prompts: cleaned, answered by the engine, resumable; or ShareGPT's own answers."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.config_toml import load_toml
from dspark_jax.data import sharegpt
from dspark_jax.data.line_file import LineFile
from dspark_jax.data.prompts import read_prompts
from dspark_jax.data.records import Records
from dspark_jax.generate import generate
from dspark_jax.targets import stop_ids
from dspark_jax.testing import ScriptedTarget
from dspark_jax.train import answers
from dspark_jax.train import prepare as module
from dspark_jax.train.answers import Talk, asks
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

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


class Rewriting(Tokenizer):
    """Its template shows an answer only while it is the last message."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        last = len(messages) - 1
        shown = [m if m["role"] == "user" or i == last else {**m, "content": "..."} for i, m in enumerate(messages)]
        return super().apply_chat_template(shown, **options)


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
    assert (meta["max_tokens"], meta["min_answer_tokens"], meta["conversations"]) == (32, 8, 3)
    assert meta["keep_away"] == [str(tmp_path / "eval.jsonl")]
    for name in ("heldout", "train"):
        lines = [prompts[int(source.removeprefix("line ")) - 1] for source in Records(tmp_path / "out" / name).sources]
        assert [f"<u>{line}$\n<a>" for line in lines] == [p for p, _ in texts(tmp_path / "out" / name)]

    path = tmp_path / "out" / ANSWERS
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:3]) + b'{"i": 4, "to')
    asked = []
    request = answers.Request
    monkeypatch.setattr(answers, "Request", lambda *a, **o: asked.append(a[0]) or request(*a, **o))
    prepare(config, target(), tmp_path / "out")
    assert len(asked) == 3 and texts(tmp_path / "out" / "heldout") + texts(tmp_path / "out" / "train") == found

    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        prepare(dataclasses.replace(config, seed=1), target(), tmp_path / "out")
    # Neither that nor a source that has changed since costs what is there, or gives answers to other questions.
    with open(source, "a") as file:
        file.write('{"prompt": "six"}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl: answer 1 of conversation \d was made to something else"):
        prepare(config, target(), tmp_path / "out")
    assert texts(tmp_path / "out" / "heldout") + texts(tmp_path / "out" / "train") == found


class Chatty(ScriptedTarget):
    """Ends its turns: the template's end-of-turn token is its end-of-text token."""

    config = SimpleNamespace(eos_token_ids=(ord("$"),))


def chatty() -> ScriptedTarget:
    base = target()
    table = base.table.at[:, ord("$")].set(4.0)  # an answer ends after a few tokens
    return Chatty(table, max_positions=128, tokenizer=Tokenizer())


def test_every_turn_is_answered_anew_behind_the_new_answers(tmp_path: Path) -> None:
    """Three turns each, from ``turns`` and from ``messages`` whose own answers are thrown away. Every answer is the
    one that plain decoding gives to all that stands before it in the record; killed and started again, with the second
    answers lost, the records are the same."""
    talk = [("user", "one"), ("assistant", "OLD"), ("user", "two"), ("assistant", "OLD"), ("user", "three")]
    lines = [
        {"turns": ["alpha", "beta", "gamma"]},
        {"messages": [{"role": r, "content": c} for r, c in talk]},
        {"turns": ["delta", "x" * 90]},
        {"prompt": "single"},
    ]
    source = tmp_path / "p.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = PrepareConfig(
        target="scripted", source=str(source), answers="regenerate", max_tokens=96, min_answer_tokens=1, heldout=1,
        turns=3, sampling=SamplingConfig(temperature=0.9), max_num_seqs=2, seed=5,
    )  # fmt: skip
    model = chatty()
    out = tmp_path / "out"
    prepare(config, model, out)
    answered = [json.loads(line) for line in (out / ANSWERS).read_text().splitlines()[1:]]
    assert max(line["turn"] for line in answered) == 2
    whole = {}
    for name in ("heldout", "train"):
        records = Records(out / name)
        for i in range(len(records)):
            batch = records.batch([i], 96)
            ids, mask = batch.tokens[0, : batch.lengths[0]], batch.loss_mask[0, : batch.lengths[0]]
            text = "".join(map(chr, ids))
            whole[text[3:].split("$")[0]] = (ids, mask)
            assert "OLD" not in text
    assert set(whole) == {"alpha", "one", "delta", "single"}
    turns = {first: int((mask & ~np.roll(mask, 1)).sum()) for first, (_, mask) in whole.items()}
    assert turns["delta"] == turns["single"] == 1 and {turns["alpha"], turns["one"]} <= {2, 3}, "no room for 90 x"
    asked = {"alpha": ["alpha", "beta", "gamma"], "one": ["one", "two", "three"]}
    order = [p.messages[0]["content"] for p in read_prompts(source)]
    random.Random(config.seed).shuffle(order)
    for first, questions in asked.items():
        ids, mask = whole[first]
        starts, ends = np.flatnonzero(mask & ~np.roll(mask, 1)), np.flatnonzero(mask & ~np.roll(mask, -1)) + 1
        rendered = "".join(map(chr, ids))
        begin = 0
        for question, start, end in zip(questions, starts, ends, strict=False):
            between = "" if begin == 0 else "\n"  # what the template puts behind an answer belongs to the question
            assert rendered[begin:start] == f"{between}<u>{question}$\n<a>"
            begin = end
        i = order.index(first)
        start, end = int(starts[1]), int(ends[1])
        seeds = jnp.asarray([config.seed + i], jnp.uint32)
        plain = generate(
            model, None, jnp.asarray(ids[None, :start], jnp.int32), jnp.asarray([start], jnp.int32), seeds=seeds,
            max_new_tokens=end - start, sampling=Sampling(0.9),
        )  # fmt: skip
        assert plain.tokens[0].tolist() == ids[start:end].tolist()

    path = out / ANSWERS
    kept = [line for line in path.read_text().splitlines(keepends=True) if '"turn": 1' not in line]
    path.write_text("".join(kept))
    before = {name: (out / name / "tokens.bin").read_bytes() for name in ("heldout", "train")}
    prepare(config, model, out)
    assert {name: (out / name / "tokens.bin").read_bytes() for name in before} == before
    with pytest.raises(ValueError, match=r"turns: 3 -> 2"):
        prepare(dataclasses.replace(config, turns=2), model, out)


def test_an_answer_also_ends_at_the_tokenizers_own_end_of_text(tmp_path: Path) -> None:
    """The configuration names none, as of chat models whose config.json knows the end of a document alone: without the
    tokenizer's, answers would run on through made-up turns to the last token that there is room for."""

    class Ending(Tokenizer):
        eos_token_id = ord("$")

    table = chatty().table
    model = ScriptedTarget(table, max_positions=128, tokenizer=Ending())
    assert stop_ids(model) == (ord("$"),)
    talk = Talk([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], 64, 1)
    assert talk.open(Ending())
    with closing(LineFile(tmp_path / ANSWERS, {})) as lines:
        answers.answer_all([talk], model, Sampling(0.9), lines, max_num_seqs=2, max_tokens=64, seed=5)
    assert talk.answers == 2 and chr(talk.ids[-1]) == "$" and "".join(map(chr, talk.ids)).count("$") == 4


def test_a_template_that_rewrites_earlier_turns_ends_the_conversation() -> None:
    """Such a template drops what earlier turns thought: the second question would not stand behind the answer that was
    made. The conversation ends with its first answer, and is counted."""

    talk = Talk(asks([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}] * 2, 2), 64, 1)
    assert talk.open(Rewriting()) and talk.answer([ord("x"), ord("$")], (ord("$"),), Rewriting())
    ids = list(talk.ids)
    assert not talk.open(Rewriting()) and talk.rewritten and talk.ids == ids
    cut = Talk([[{"role": "user", "content": "a"}]] * 2, 64, 1)
    assert cut.open(Tokenizer()) and not cut.answer([ord("x")], (ord("$"),), Tokenizer()), "no stop: it was cut"


def test_questions_are_compared_without_the_system_message(tmp_path: Path) -> None:
    """A common system message does not make every conversation a repeat."""
    lines = [[{"role": "system", "content": "s"}, {"role": "user", "content": c}] for c in ("a", "b", "A!")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    config = PrepareConfig(source=str(tmp_path / "p.jsonl"), answers="regenerate")
    found = module.conversations(config, target())
    assert sorted(m[1]["content"].strip("!").lower() for _, m in found) == ["a", "b"]


def test_all_turns_and_token_ids_of_evaluations_are_kept_away(tmp_path: Path, caplog: Any) -> None:
    """A second turn, and a prompt of token ids; a source of token ids has nothing to ask, which is said."""
    kept = tmp_path / "eval.jsonl"
    away = [{"turns": ["hello", "name four lakes"]}, {"prompt_ids": [ord(c) for c in "Name three rivers."]}]
    kept.write_text("".join(json.dumps(line) + "\n" for line in away))
    source = tmp_path / "p.jsonl"
    asked = [{"prompt": text} for text in ("NAME three rivers", "Name four lakes!", "name five seas")]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*asked, {"prompt_ids": [65]}]))
    config = PrepareConfig(source=str(source), answers="regenerate", keep_away=(kept,))
    assert [m[0]["content"] for _, m in module.conversations(config, target())] == ["name five seas"]
    assert "left out: 1 lines that are not the text of a user" in caplog.text
    kept.write_text(json.dumps({"prompt_ids": [65, VOCAB]}))
    with pytest.raises(ValueError, match=r"eval.jsonl:1: token id 128, but .* 128 tokens; give the texts themselves"):
        list(module.conversations(config, target()))


def test_rows_of_a_cached_data_set_are_prompts_and_what_is_missing_is_said(monkeypatch: Any) -> None:
    """A stand-in for the package ``datasets``: rows of the usual columns, one broken. Without the package, without the
    data set, with another split: an error that says what to do."""

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        assert os.environ["HF_DATASETS_OFFLINE"] == "1" and fake.config.HF_DATASETS_OFFLINE
        if name != "me/talks":
            raise ConnectionError("Couldn't reach 'me/other' on the Hub (OfflineModeIsEnabled)")
        if split != "train":
            raise ValueError("Unknown split \"test\". Should be one of ['train'].")
        assert config in (None, "small")
        talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "r"}]
        return [{"messages": None, "turns": ["one", "two"]}, {"text": "x"}, {"conversations": talk}]

    fake: Any = SimpleNamespace(config=SimpleNamespace(HF_DATASETS_OFFLINE=False), load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    config = PrepareConfig(source="hf:me/talks@small", answers="regenerate", turns=2)
    found = dict(module.conversations(config, target()))
    assert [len(asks(found[f"line {i}"], 2)) for i in (1, 3)] == [2, 2]
    assert found["line 1"][2]["content"] == "two" and found["line 3"][1]["content"] == "a"
    with pytest.raises(FileNotFoundError, match=r"hf:me/other: not in the local cache .*load_dataset\('me/other'\)"):
        list(module.conversations(dataclasses.replace(config, source="hf:me/other"), target()))
    with pytest.raises(ValueError, match=r"hf:me/talks, split test: Unknown split"):
        list(module.conversations(dataclasses.replace(config, source="hf:me/talks", split="test"), target()))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets .*pip install 'dspark-jax\[hf\]'"):
        list(module.conversations(config, target()))


def test_a_data_set_in_a_real_cache_is_read(tmp_path: Path) -> None:
    """As ``datasets`` itself lays it out, in a process of its own: the package reads its settings when imported."""
    pytest.importorskip("datasets", reason="the package datasets is not installed (extra hf)")
    code = """
        import json, os, sys
        from pathlib import Path
        import pyarrow as pa
        from dspark_jax.data import hf_dataset
        from dspark_jax.data.prompts import read_rows
        place = Path(os.environ["HF_DATASETS_CACHE"]) / "me___talks" / "default" / "0.0.0" / "0123456789abcdef"
        place.mkdir(parents=True)
        rows = [[{"role": "user", "content": text}] for text in ("hi", "yo")]
        table = pa.table({"messages": rows})
        with pa.ipc.new_stream(str(place / "talks-train.arrow"), table.schema) as file:
            file.write_table(table)
        text = {"dtype": "string", "_type": "Value"}
        features = {"messages": {"feature": {"role": text, "content": text}, "_type": "List"}}
        split = {"name": "train", "num_bytes": 1, "num_examples": 2, "dataset_name": "talks"}
        version = {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}
        info = {"builder_name": "talks", "dataset_name": "talks", "config_name": "default", "version": version,
                "features": features, "splits": {"train": split}}
        (place / "dataset_info.json").write_text(json.dumps(info))
        print([p.messages[0]["content"] for p in read_rows(hf_dataset.rows("hf:me/talks"), "hf:me/talks")])
        try:
            list(hf_dataset.rows("hf:me/nothing"))
        except FileNotFoundError as error:
            print(error)
    """
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['hi', 'yo']\nhf:me/nothing: not in the local cache of data sets")


def test_answers_of_the_source_are_kept_and_sets_share_no_conversation(tmp_path: Path, monkeypatch: Any) -> None:
    """Parts of conversation a are held out: its other part is in no training set."""
    parts = [("a", "q1"), ("b", "q2"), ("a", "q3"), ("c", "q4")]
    talks = [(n, [{"role": "user", "content": q}, {"role": "assistant", "content": "answer"}]) for n, q in parts]
    monkeypatch.setattr(sharegpt, "find_file", lambda: tmp_path)
    monkeypatch.setattr(sharegpt, "read", lambda path: [])
    monkeypatch.setattr(sharegpt, "shuffled", lambda entries, seed, max_characters: iter(talks))
    config = PrepareConfig(target="scripted", max_tokens=40, min_answer_tokens=5, heldout=1)
    assert prepare(config, target(), tmp_path / "out") == {"heldout": 1, "train": 2}
    assert [p for p, _ in texts(tmp_path / "out" / "train")] == ["<u>q2$\n<a>", "<u>q4$\n<a>"]
    assert texts(tmp_path / "out" / "heldout") == [("<u>q1$\n<a>", "answer$")]
    assert Records(tmp_path / "out" / "train").sources == ["b", "c"]
    with pytest.raises(ValueError, match="scripted: a target without a tokenizer"):
        prepare(config, target().replace(tokenizer=None), tmp_path / "out")


def test_kept_answers_of_a_template_that_rewrites_earlier_turns_are_records_of_their_own(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """What was said before an answer is whole in its record, and both records of a conversation are in one set."""
    caplog.set_level("INFO", "dspark_jax.data")
    texts_of = {"a": ("q1", "one"), "b": ("q2", "two")}
    talks = [
        (name, [{"role": r, "content": c} for r, c in (("user", q), ("assistant", a), ("user", "r"), ("assistant", a))])
        for name, (q, a) in texts_of.items()
    ]
    monkeypatch.setattr(sharegpt, "find_file", lambda: tmp_path)
    monkeypatch.setattr(sharegpt, "read", lambda path: [])
    monkeypatch.setattr(sharegpt, "shuffled", lambda entries, seed, max_characters: iter(talks))
    config = PrepareConfig(target="scripted", max_tokens=40, min_answer_tokens=4, heldout=2)
    assert prepare(config, target().replace(tokenizer=Rewriting()), tmp_path / "out") == {"heldout": 2, "train": 2}
    assert texts(tmp_path / "out" / "train") == [
        ("<u>q2$\n<a>", "two$"),
        ("<u>q2$\n<a>...$\n<u>r$\n<a>", "two$"),
    ]
    assert "this chat template rewrites earlier turns: 2 conversations were rendered anew" in caplog.text
    assert "as 4 parts in all" in caplog.text and "left out: 0 records with fewer than 4 tokens" in caplog.text


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
