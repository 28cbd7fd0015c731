"""Cached teacher states: the same losses up to float16, resumable, and a damaged file is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.data.records import Records
from dspark_jax.data.teacher_cache import DamagedShard, TeacherCache, TeacherCacheWriter
from dspark_jax.train import cached_teacher
from dspark_jax.train.cached_teacher import build
from dspark_jax.train.loop import Run
from tests.train import tiny_run

FLOAT16 = 2.0**-11
"""Relative rounding of float16."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_teacher, "SHARD_RECORDS", 3)


def config(tmp_path: Path, **data: Any) -> Any:
    base = tiny_run.config(tmp_path)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **data),
        drafter=dataclasses.replace(base.drafter, bigram_start=False),
        optim=dataclasses.replace(base.optim, total_steps=3),
    )


def totals(folder: Path) -> np.ndarray:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([[line[name] for name in ("total", "ce", "l1", "confidence")] for line in lines if "ce" in line])


@pytest.mark.slow
def test_a_run_on_cached_states_has_the_losses_of_one_that_asks_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every term of three steps, within what rounding the states to float16 can do to a mean of a few dozen slots; not
    bit for bit, or the cache was not read. The target is not run: with its layers poisoned behind the making of the
    cache the losses stay. Without them the run online is another one."""
    both = config(tmp_path), config(tmp_path, teacher_cache=tmp_path / "cache")
    target = tiny_run.target()
    assert build(both[1], target, tmp_path / "cache", limit=6) == 6
    Run(both[0], target, tmp_path / "online").run()
    run = Run(both[1], target, tmp_path / "cached")
    poisoned = target.replace(params={**target.params, "norm": target.params["norm"] * jnp.nan})
    evaluated = run.evaluate()
    monkeypatch.setattr(run, "evaluate", lambda: evaluated)
    run.frozen = run.frozen.replace(target=poisoned)
    run.run()
    online, cached = totals(tmp_path / "online"), totals(tmp_path / "cached")
    assert online.shape == (3, 4) and np.isfinite(cached).all()
    np.testing.assert_allclose(cached, online, rtol=8 * FLOAT16)
    assert (cached != online).any()

    more = dataclasses.replace(both[1], optim=dataclasses.replace(both[1].optim, total_steps=4))
    with pytest.raises(ValueError, match=r"of 2 records the states of 2 are missing, the first is record 6; make more"):
        Run(more, target, tmp_path / "cached")


def test_states_are_those_of_the_target_and_an_interrupted_cache_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven records in shards of 3, 3, 1. Killed while the second is written; then only that and the third are made.
    More records later leave the whole shards alone. Of a record that is shorter than the length the rest is 0."""
    settings, target = config(tmp_path), tiny_run.target()
    made = []
    write = TeacherCacheWriter.write

    def dies(self: Any, number: int, ids: Any, states: Any) -> None:
        if number == 1 and not made:
            raise KeyboardInterrupt
        made.append((number, len(ids)))
        write(self, number, ids, states)

    with monkeypatch.context() as patch:
        patch.setattr(TeacherCacheWriter, "write", lambda self, n, *a: dies(self, n, *a) if n else write(self, n, *a))
        with pytest.raises(KeyboardInterrupt):
            build(settings, target, tmp_path / "cache", 7)
    monkeypatch.setattr(
        TeacherCacheWriter, "write", lambda self, n, i, s: made.append((n, len(i))) or write(self, n, i, s)
    )
    build(settings, target, tmp_path / "cache", 7)
    assert made == [(1, 3), (2, 1)]
    build(settings, target, tmp_path / "cache", 8)
    assert made[2:] == [(2, 2)]

    run = Run(settings, target, tmp_path / "run")
    cache = TeacherCache(tmp_path / "cache", cached_teacher.header(settings, target, run.records))
    assert len(cache) == 8
    batch = run.records.batch([7, 2], 24)
    final, taps = (np.asarray(x) for x in cached_teacher.make_teacher_step((0,))(target, batch.tokens))
    got = cache.states([7, 2], 24)
    assert [x.dtype for x in got] == [np.float16] * 2 and [x.shape for x in got] == [(2, 24, 16)] * 2
    for mine, theirs in zip(got, (final, taps), strict=True):
        np.testing.assert_allclose(mine[:, :20], theirs[:, :20], rtol=FLOAT16, atol=1e-6)
        assert (mine[:, 20:] == 0).all()
    short = cache.states([0], 5)[0]
    np.testing.assert_array_equal(short, cache.states([0], 24)[0][:, :5])


@pytest.mark.slow
def test_a_damaged_shard_stops_the_run_with_its_last_checkpoint_whole(tmp_path: Path) -> None:
    """The second shard is damaged: the run stops behind its first step, whose batch is in the first shard. With the
    shard made anew it goes on."""
    settings = config(tmp_path, teacher_cache=tmp_path / "cache")
    target = tiny_run.target()
    build(settings, target, tmp_path / "cache", 6)
    path = tmp_path / "cache" / "states-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    run = Run(settings, target, tmp_path / "run")
    with pytest.raises(DamagedShard, match=r"states-00001\.bin: .* bytes, .* were written; delete it"):
        run.run()
    assert run._manager.latest_step() == 1
    build(settings, target, tmp_path / "cache", 6)
    again = Run(settings, target, tmp_path / "run")
    again.run()
    assert int(again.state.step) == 3


def test_a_damaged_shard_is_named_and_made_anew(tmp_path: Path) -> None:
    """One bit changed, the end cut off, deleted: each time the file is named with what to do, the other shard still
    serves, and making the cache again makes that file alone as it was."""
    settings, target = config(tmp_path), tiny_run.target()
    build(settings, target, tmp_path / "cache", 6)
    header = cached_teacher.header(settings, target, Records(settings.data.train))
    path = tmp_path / "cache" / "states-00001.bin"
    content = path.read_bytes()
    changed = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    for broken, why in ((changed, "damaged"), (content[:-2], ".* bytes, .* were written"), (None, "no such file")):
        path.unlink() if broken is None else path.write_bytes(broken)
        cache = TeacherCache(tmp_path / "cache", header)
        cache.states([0, 2], 20)
        with pytest.raises(DamagedShard, match=rf"states-00001\.bin: {why}.*; delete it and run scripts/cache_teacher"):
            cache.states([2, 3], 20)
        before = (tmp_path / "cache" / "states-00000.bin").stat().st_mtime_ns
        build(settings, target, tmp_path / "cache", 6)
        assert path.read_bytes() == content
        assert (tmp_path / "cache" / "states-00000.bin").stat().st_mtime_ns == before


def test_a_cache_of_something_else_is_refused_with_the_difference(tmp_path: Path) -> None:
    """Other taps, length, text or target; taps of no layer; an index that is none; states that float16 cannot hold."""
    settings, target = config(tmp_path), tiny_run.target()
    build(settings, target, tmp_path / "cache", 1)
    where = {"teacher_cache": tmp_path / "cache"}
    other_taps = dataclasses.replace(settings.drafter, target_layer_ids=(1,))
    for changed, why in (
        (config(tmp_path, **where, length=16), r"length: 20 -> 16"),
        (dataclasses.replace(config(tmp_path, **where), drafter=other_taps), r"taps: \[0\] -> \[1\]"),
        (config(tmp_path, **where, train=tmp_path / "heldout"), "records: "),
        (dataclasses.replace(config(tmp_path, **where), target="another"), "target: 'tiny' -> 'another'"),
    ):
        with pytest.raises(ValueError, match=f"holds teacher states of something else: .*{why}"):
            Run(changed, target, tmp_path / "run")
    adapted = target.replace(params=jax.tree.map(lambda x: x + 0.1 * (x.ndim > 1), target.params))
    with pytest.raises(ValueError, match=r"something else: digest: '\w+' -> '\w+'\. Give another folder, or delete"):
        Run(config(tmp_path, **where), adapted, tmp_path / "run")
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    del index["header"]["digest"]  # as an earlier version wrote it
    (tmp_path / "cache" / "index.json").write_text(json.dumps(index))
    build(settings, target, tmp_path / "cache", 2)
    assert len(TeacherCache(tmp_path / "cache", cached_teacher.header(settings, target, Records(settings.data.train))))
    nowhere = dataclasses.replace(settings.drafter, target_layer_ids=(2,))
    with pytest.raises(ValueError, match="target_layer_ids must rise from -1 .* to 1 or less, found "):
        build(dataclasses.replace(settings, drafter=nowhere), target, tmp_path / "cache", 1)
    (tmp_path / "cache" / "index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: not an index of teacher states"):
        build(settings, target, tmp_path / "cache", 1)
    (tmp_path / "cache" / "index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no cached teacher states here; scripts/cache_teacher\.py"):
        Run(config(tmp_path, **where), target, tmp_path / "run")
    big = target.replace(params={**target.params, "norm": target.params["norm"] * 1e6})
    with pytest.raises(ValueError, match="do not fit into float16; train without data.teacher_cache"):
        build(settings, big, tmp_path / "big", 1)


def test_states_begin_where_the_run_does_and_missing_ones_are_named_before_it_begins(tmp_path: Path) -> None:
    """Three steps of two records, from record 4 on, are records 4 to 9. States of four of them are too few; six are
    enough. A folder that begins at another record is refused rather than overwritten."""
    settings, target = config(tmp_path, teacher_cache=tmp_path / "cache", first=4), tiny_run.target()
    assert build(settings, target, tmp_path / "cache", limit=4) == 4
    with pytest.raises(ValueError, match="of 6 records the states of 2 are missing, the first is record 8; make more"):
        Run(settings, target, tmp_path / "run")
    assert build(settings, target, tmp_path / "cache", limit=6) == 6
    Run(settings, target, tmp_path / "run")._next_states()
    with pytest.raises(ValueError, match=r"from record 4 on, and data\.first = 0 begins at record 0; give another"):
        build(config(tmp_path), target, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"no record has .* behind the 40 that are passed over"):
        build(config(tmp_path, first=40), target, tmp_path / "other")
