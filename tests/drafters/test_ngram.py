"""Corpus n-grams as a drafter: tables by hand, exact under both rules, files that say what is wrong with them."""

from __future__ import annotations

import dataclasses
import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import Sampling
from dspark_jax.data import ngrams
from dspark_jax.data.ngrams import NgramConfig, NgramTables, count
from dspark_jax.data.records import Records, write_records
from dspark_jax.drafters import NgramDrafter
from dspark_jax.engine import Engine, Request
from dspark_jax.generate import generate
from dspark_jax.layout import ragged_layout
from dspark_jax.load import load_drafter
from dspark_jax.testing import ScriptedTarget, enumerate_worlds
from tests.drafters.chain_cases import Argmax
from tests.engine.cases import engine_config, expected, run_all
from tests.law.worlds import LARGEST, RULED, G, Setting, V, every_length_or, law_errors
from tests.law.worlds import decode as decode_worlds
from tests.test_refused_early import script

A, B, C, D = range(4)
TEXT = [([A, B, C], [0, 1, 1]), ([A, B, C, A, B, D, A], [0, 1, 1, 1, 1, 1, 0])]
"""Learnt pairs: AB BC | AB BC CA AB BD; learnt triples: ABC | ABC BCA CAB ABD. Unigrams: B 3, C 2, A 1, D 1 of 7."""
SIZE = NgramConfig(vocab_size=4, successors=4)


def counted(tmp_path: Path, config: NgramConfig = SIZE, **options: Any) -> NgramTables:
    write_records(tmp_path / "records", TEXT, vocab_size=4)
    return count(Records(tmp_path / "records"), config, **options)


def law(ids: np.ndarray, log_p: np.ndarray) -> dict[int, float]:
    there = np.isfinite(log_p)
    return dict(zip(ids[there].tolist(), np.exp(log_p[there].astype(float)).tolist(), strict=True))


def test_tables_are_the_interpolated_counts_of_what_is_learnt_and_a_rare_context_backs_off(tmp_path: Path) -> None:
    """By hand, with 0.75 taken off every count. Behind B (twice C, once D; 3 in all, 2 kinds): 1/2 goes to the
    unigram law, so C has 1.25/3 + 1/2 * 2/7. Behind AB (the same counts) 1/2 goes to the law behind B. BC and CA were
    seen once as contexts: they are no contexts of trigrams. The last token A of the text is not learnt, so DA is no
    pair, and behind D stands the unigram law."""
    tables = counted(tmp_path)
    assert tables.first is not None and tables.second is not None and tables.trigram_log_p is not None
    unigram = {B: 3 / 7, C: 2 / 7, A: 1 / 7, D: 1 / 7}
    behind_b = {C: 1.25 / 3 + 1 / 7, D: 0.25 / 3 + 1 / 14, B: 3 / 14, A: 1 / 14}
    behind_ab = {C: 1.25 / 3 + behind_b[C] / 2, D: 0.25 / 3 + behind_b[D] / 2, B: 3 / 28, A: 1 / 28}
    for token, hand in ((D, unigram), (B, behind_b)):
        assert law(tables.bigram_ids[token], tables.bigram_log_p[token]) == pytest.approx(hand, rel=2e-3)  # float16
    assert tables.first.tolist() == [0, 1, 1, 1, 1] and tables.second.tolist() == [B]
    assert tables.trigram_ids is not None
    assert law(tables.trigram_ids[0], tables.trigram_log_p[0]) == pytest.approx(behind_ab, rel=2e-3)
    assert sum(behind_ab.values()) == pytest.approx(1)
    assert (np.diff(tables.bigram_log_p.astype(float), axis=1) <= 0).all(), "successors by falling probability"

    every = counted(tmp_path, least=1)
    assert every.second is not None and every.second.tolist() == [B, C, A], "AB, BC and CA"
    assert counted(tmp_path, dataclasses.replace(SIZE, order=2)).second is None


def test_drafts_follow_the_longest_known_context(tmp_path: Path) -> None:
    """Greedy drafts behind (C, A): B (bigram); then (A, B): C (trigram); then (B, C), no trigram context: what
    follows C. Row 1 starts behind B with nothing known before. ``absorb`` remembers the last token that stays."""
    tables = counted(tmp_path)
    tables.bigram_ids[B, :2] = [A, C]  # the bigram alone would say A behind B
    drafter = NgramDrafter.build(SIZE, tables)
    proposal = drafter.propose(jnp.array([C, D]), jnp.array([A, B]), jnp.array([5, 5]), 3, Argmax(None))
    assert proposal.tokens.tolist() == [[B, C, A], [A, B, C]]
    layout = ragged_layout(jnp.array([4, 6, 2]), jnp.array([3, 0, 2]), 4, 6)
    state = drafter.absorb(
        jnp.array([0, D, 0]), jnp.zeros((6, 0)), layout, jnp.array([A, B, C, B, D, 0]), jnp.array([2, 0, 2])
    )
    assert state.tolist() == [B, D, D]


def test_every_context_is_found_and_no_other() -> None:
    """The search among the contexts of a first token, against a dictionary, at every pair of 12 tokens. Contexts of a
    token number 0 to 12, so all of its edges occur."""
    rng = np.random.default_rng(0)
    size = 12
    pairs = sorted((a, int(b)) for a in range(size) for b in rng.choice(size, min(a, size), replace=False))
    first = np.searchsorted([a for a, _ in pairs], np.arange(size + 1)).astype(np.int32)
    second = np.array([b for _, b in pairs], np.int32)
    ids = np.arange(len(pairs), dtype=np.int32)[:, None] % size
    zero, bigram = np.zeros((len(pairs), 1), np.float16), np.full((size, 1), 7, np.int32)
    tables = NgramTables(bigram, np.zeros((size, 1), np.float16), first, second, ids, zero)
    drafter = NgramDrafter.build(NgramConfig(size, successors=1), tables)
    before, token = (jnp.asarray(x.ravel(), jnp.int32) for x in np.mgrid[:size, :size])
    got = np.asarray(drafter.logits(before, token)).argmax(-1).reshape(size, size)
    known = {pair: i % size for i, pair in enumerate(pairs)}
    assert got.tolist() == [[known.get((a, b), 7) for b in range(size)] for a in range(size)]
    assert len({a for a, _ in pairs}) == size - 1 and max(np.diff(first)) == 11


@dataclasses.dataclass(frozen=True)
class NgramSetting(Setting):
    """A law setting whose drafter are trigram tables of K successors."""

    successors: int = 2

    @property
    def drafter(self) -> Any:
        rng = np.random.default_rng(3)
        k = self.successors
        laws = [rng.dirichlet(np.ones(V), n) for n in (V, 4)]
        ids = [np.argsort(-p, axis=1)[:, :k].astype(np.int32) for p in laws]
        logs = [np.log(np.take_along_axis(p, i, axis=1)).astype(np.float16) for p, i in zip(laws, ids, strict=True)]
        first, second = np.array([0, 2, 2, 4], np.int32), np.array([0, 2, 1, 2], np.int32)
        tables = NgramTables(ids[0], logs[0], first, second, ids[1], logs[1])
        return NgramDrafter.build(NgramConfig(V, successors=k), tables, dtype=jnp.float64)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("successors", [1, 2])
def test_the_law_stays_the_targets_under_rejection(successors: int) -> None:
    """Every branch of two cycles (tests/law/worlds.py), whatever is admitted: certain drafts and drawn ones. With one
    successor the drafts are one token: an acceptance without the residual would show at once."""
    p = 1.5 * np.random.default_rng(1).normal(size=((V + 1) ** 2, V))
    setting = NgramSetting(p, np.zeros((G, 1, V)), successors=successors, sampling=Sampling())
    admit = every_length_or(lambda proposal: jnp.ones(proposal.tokens.shape[0], jnp.int32))
    arities = [V] * G + [RULED + 1] + [2] * G + [V] + [V] * G + [2] * G + [V]
    tape, out = enumerate_worlds(lambda tape: decode_worlds(setting, admit, tape), arities=arities, at_least=LARGEST)
    assert law_errors(setting, tape, out).max() <= 1e-12
    drawn = np.asarray(jax.nn.softmax(out.proposals[0].base))
    assert ((drawn > 1e-12).sum(-1) == successors).all()


def models() -> tuple[ScriptedTarget, NgramDrafter]:
    """A bigram target, and its own likeliest successors, disturbed, as tables of trigrams of every other token."""
    rng = np.random.default_rng(5)
    size = 7
    table = 2.0 * rng.normal(size=(size + 1, size))
    noisy = table[:size] + rng.normal(size=(size, size))
    ids = np.argsort(-noisy, axis=1)[:, :3].astype(np.int32)
    log_p = np.take_along_axis(noisy, ids, axis=1).astype(np.float16)
    first = np.arange(size + 1, dtype=np.int32) * size
    second = np.tile(np.arange(size, dtype=np.int32), size)
    trigrams = NgramTables(ids, log_p, first, second, np.tile(ids[:, ::-1], (size, 1)), np.tile(log_p, (size, 1)))
    drafter = NgramDrafter.build(NgramConfig(size, successors=3), trigrams, dtype=jnp.float64)
    return ScriptedTarget(jnp.asarray(table), max_positions=64), drafter


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("temperature", "verification"),
    [(0.0, "rejection"), pytest.param(0.9, "coupled", marks=pytest.mark.slow)],
)
def test_texts_equal_plain_decoding(temperature: float, verification: Any) -> None:
    """Greedy and seeded texts of 40 tokens, token for token; and some drafts are accepted, some are not."""
    target, drafter = models()
    options: dict[str, Any] = {"max_new_tokens": 40, "sampling": Sampling(temperature), "verification": verification}
    prompts, lengths = jnp.array([[1, 2, 3], [4, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32)
    arguments = prompts, lengths
    fast, plain = (
        jax.jit(partial(generate, **options))(target, d, *arguments, seeds=jnp.array([3, 4], jnp.uint32))
        for d in (drafter, None)
    )
    assert fast.tokens.tolist() == plain.tokens.tolist()
    committed = np.asarray(fast.committed)
    assert 1 in committed and committed.max() > 1


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_engine_and_generate_run_the_same_cycles() -> None:
    """Prompts in pieces and a slot that moves: the token remembered of every slot is the right one."""
    both = models()
    config = engine_config(
        max_num_seqs=2, num_speculative_tokens=3, prefill_buckets=(4,), slot_buckets=(1,), context_buckets=None
    )
    engine = Engine(*both, config)
    requests = [
        Request(prompt, n, sampling=Sampling(temperature=0.8), seed=11 + i, verification="rejection")
        for i, (prompt, n) in enumerate(zip(([3, 1, 4, 1, 5, 2, 6], [0, 1, 6, 2, 4, 3]), (10, 16), strict=True))
    ]
    assert run_all(engine, requests) == expected(both, requests, num_speculative_tokens=3)
    assert engine.counters()["moves"] > 0


def test_a_folder_is_a_drafter_and_damage_is_named(tmp_path: Path) -> None:
    """Saved, loaded by name, equal; a changed byte, a cut-off save, another target and another folder are errors that
    name the file."""

    class Named(ScriptedTarget):
        vocab_limit = 4

    target: Any = Named(jnp.zeros((5, 4), jnp.float32))
    tables, folder = counted(tmp_path), tmp_path / "ngram"
    ngrams.save(folder, SIZE, tables, {"records": 2})
    loaded: Any = load_drafter(folder, target)
    assert isinstance(loaded, NgramDrafter) and loaded.name == "ngram" and loaded.block_size == 7
    here = NgramDrafter.build(SIZE, tables)
    pair = jnp.array([A, C]), jnp.array([B, A])
    assert np.array_equal(loaded.logits(*pair), here.logits(*pair))

    with pytest.raises(ValueError, match="vocabulary of 4, but the target has 5"):
        load_drafter(folder, ScriptedTarget(jnp.zeros((6, 5))))
    content = (folder / ngrams.TABLES).read_bytes()
    (folder / ngrams.TABLES).write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match=r"ngram\.npz: damaged .*count again"):
        load_drafter(folder, target)
    (folder / ngrams.TABLES).write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "order": 2}))
    with pytest.raises(ValueError, match="order is 2, trigrams are there"):
        load_drafter(folder, target)
    del config["order"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: not the configuration of n-gram tables \('order'\)"):
        load_drafter(folder, target)
    (folder / ngrams.TABLES).unlink()
    with pytest.raises(FileNotFoundError, match=r"ngram\.npz: no such file"):
        load_drafter(folder, target)


def test_text_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "empty", [([1, 2], [1, 0])], vocab_size=4)
    with pytest.raises(ValueError, match="no learnt token that follows another"):
        count(Records(tmp_path / "empty"), SIZE)
    write_records(tmp_path / "wide", [([1, 9], [1, 1])], vocab_size=16)
    with pytest.raises(ValueError, match="token 9 is beyond the vocabulary of 4"):
        count(Records(tmp_path / "wide"), SIZE)
    with pytest.raises(ValueError, match="order must be 2 or 3"):
        NgramConfig(4, order=4)


def test_tables_stay_where_the_disk_has_no_room_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so in one line, with status 3."""
    counted(tmp_path)
    (tmp_path / "c.toml").write_text(f'records = "{tmp_path / "records"}"\n')
    count_ngrams = script("count_ngrams").main
    command = ["--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "ngram")]
    assert count_ngrams(command) == 0
    before = ngrams.load(tmp_path / "ngram")[0]

    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert count_ngrams([*command, "--set", "order=2"]) == 3
    assert "ngram: no space left on the disk; make room and start again" in capsys.readouterr().err
    assert ngrams.load(tmp_path / "ngram")[0] == before
