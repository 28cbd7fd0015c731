"""A whole run on a tiny target: it learns, and an interrupted run ends exactly where an unbroken one does."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.deepspec import read_deepspec, write_deepspec
from dspark_jax.data import ngrams
from dspark_jax.data.records import Records, write_records
from dspark_jax.drafters.dspark import drafter_specs
from dspark_jax.progress import Progress
from dspark_jax.train import warm_start
from dspark_jax.train.config import RunConfig
from dspark_jax.train.loop import NonFiniteLoss, OutOfText, Run, read_input
from dspark_jax.train.read_text import ReadText, texts_read
from dspark_jax.whole_file import DiskFull
from tests.train import tiny_run


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "total" in line]


@pytest.mark.slow
def test_an_interrupted_run_equals_an_unbroken_one_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, moments, key, cursor and losses; the export reads back as the parameters."""
    target, config = tiny_run.target(), tiny_run.config(tmp_path)
    seldom = dataclasses.replace(config, run=dataclasses.replace(config.run, save_every_s=3600.0))
    whole = Run(seldom, target, tmp_path / "whole")
    whole.run()
    assert [line["step"] for line in _lines(tmp_path / "whole")] == [1, 2, 3, 4]

    tiny_run.interrupt(Run(config, target, tmp_path / "broken"), 2, monkeypatch)
    resumed = Run(config, target, tmp_path / "broken")
    assert int(resumed.state.step) == 2 and int(resumed.state.cursor) == 4
    resumed.run()

    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    totals = [[line["total"] for line in _lines(tmp_path / name)] for name in ("whole", "broken")]
    assert totals[0] == totals[1]

    pieces = read_deepspec(resumed.export(tmp_path / "plain", quantize=False), drafter_specs)
    assert pieces.config == resumed.drafter and pieces.config.block_widths == (1, 2, 3)
    jax.tree.map(np.testing.assert_array_equal, pieces.params, resumed.state.params)
    assert resumed.d2t is not None
    np.testing.assert_array_equal(pieces.d2t, resumed.d2t)

    with pytest.raises(ValueError, match="drafter.markov_rank: 4 -> 8"):
        other = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, markov_rank=8))
        Run(other, target, tmp_path / "broken")


def test_the_loss_falls_until_the_text_is_used_up(tmp_path: Path) -> None:
    """60 steps need 120 records; with 100 the run stops after 50, its work saved and nothing repeated."""
    config = tiny_run.config(tmp_path, 100)
    optim = dataclasses.replace(config.optim, total_steps=60)
    config = dataclasses.replace(config, optim=optim, run=RunConfig(log_every=5, save_every_s=3600.0))
    run = Run(config, tiny_run.target(), tmp_path / "run")
    before = run.evaluate()["width_3"]["tau"]
    with pytest.raises(OutOfText, match="all 100 records"):
        run.run()
    totals = [line["total"] for line in _lines(tmp_path / "run")]
    assert totals[-1] < 0.9 * totals[0]
    assert run.evaluate()["width_3"]["tau"] > before
    assert (tmp_path / "run" / "checkpoints" / "50").is_dir()


def break_behind_step_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the target of a run says nothing finite."""
    sound, next_batch = run.frozen, run._next_batch

    def breaks() -> Any:
        if int(run.state.step) == 2:
            params = {**sound.target.params, "norm": sound.target.params["norm"].at[0].set(jnp.nan)}
            run.frozen = sound.replace(target=sound.target.replace(params=params))
        return next_batch()

    monkeypatch.setattr(run, "_next_batch", breaks)


def test_updates_without_a_finite_loss_are_skipped_and_a_row_of_them_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that breaks behind step 2: nothing it says changes a parameter, the run stops after 4 updates (two
    steps), its checkpoint is that of step 2, and from there a sound run ends as if nothing had been."""
    config = tiny_run.config(tmp_path, run=RunConfig(log_every=1, save_every_s=0.0, max_skipped=4))
    run = Run(config, tiny_run.target(), tmp_path / "run")
    break_behind_step_2(run, monkeypatch)
    with pytest.raises(NonFiniteLoss, match="step 4: 4 updates in a row .* the last checkpoint is of step 2"):
        run.run()
    assert [line["skipped"] for line in _lines(tmp_path / "run")] == [0, 0, 2, 2]
    assert _lines(tmp_path / "run")[-1]["total"] is None

    again = Run(config, tiny_run.target(), tmp_path / "run")
    assert int(again.state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, again.state.params, run.state.params)
    again.run()
    assert [line["step"] for line in _lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert all(line["total"] is not None for line in _lines(tmp_path / "run"))


def test_steps_behind_the_last_whole_stretch_of_the_log_are_written_and_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines every two steps; the text lasts for three. The third step has its line, and where its two updates are
    without a finite loss the run says so instead of ending as if nothing had been."""
    config = tiny_run.config(tmp_path, 6, run=RunConfig(log_every=2, save_every_s=3600.0, max_skipped=2))
    run = Run(config, tiny_run.target(), tmp_path / "run")
    with pytest.raises(OutOfText, match="all 6 records"):
        run.run()
    assert [line["step"] for line in _lines(tmp_path / "run")] == [2, 3]
    assert _lines(tmp_path / "run")[-1]["records"] == 6

    run = Run(config, tiny_run.target(), tmp_path / "broken")
    break_behind_step_2(run, monkeypatch)
    with pytest.raises(NonFiniteLoss, match="step 3: 2 updates in a row .* no checkpoint was written yet"):
        run.run()


def test_a_full_disk_stops_the_run_with_its_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.config(tmp_path)
    run = Run(config, tiny_run.target(), tmp_path / "run")
    save = run.save

    def full() -> None:
        if int(run.state.step) == 3:
            raise RuntimeError("write failed") from OSError(errno.ENOSPC, "No space left on device")
        save()

    monkeypatch.setattr(run, "save", full)
    with pytest.raises(DiskFull, match="no space left on the disk; the checkpoint of step 2 is whole"):
        run.run()
    assert int(Run(config, tiny_run.target(), tmp_path / "run").state.step) == 2


def test_data_sets_that_are_too_small_or_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    config = tiny_run.config(tmp_path, 3)
    few = dataclasses.replace(config, data=dataclasses.replace(config.data, least_learnt=17))
    with pytest.raises(ValueError, match="train: 0 of 3 records have 17 learnt tokens among their first 20"):
        Run(few, tiny_run.target(), tmp_path / "run")
    few = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout_batches=3))
    with pytest.raises(ValueError, match="heldout: 4 records, but an evaluation needs 6"):
        Run(few, tiny_run.target(), tmp_path / "run")
    write_records(tmp_path / "wide", [([24] * 20, [True] * 20)] * 4, vocab_size=25)
    wide = dataclasses.replace(config, data=dataclasses.replace(config.data, heldout=tmp_path / "wide"))
    with pytest.raises(ValueError, match="wide: records of 25 different tokens, but the target has 24"):
        Run(wide, tiny_run.target(), tmp_path / "run")


def test_a_run_that_starts_from_a_drafter_goes_on_with_its_parameters_positions_and_text(tmp_path: Path) -> None:
    """The export of a run, unquantised, is where the next one begins: the same parameters and draft vocabulary, its
    positions counted on, its records passed over. Started again once that drafter is gone, the second run resumes."""
    target, config = tiny_run.target(), tiny_run.config(tmp_path)
    first = Run(config, target, tmp_path / "first")
    first.run()
    export = first.export(tmp_path / "drafter", quantize=False)
    seen = json.loads((export / "config.json").read_text())["training"]
    assert seen["text"] and {name: value for name, value in seen.items() if name != "text"} == {
        "steps": 4, "positions": int(first.state.positions), "records": 8, "length": 20, "least_learnt": 2,
    }  # fmt: skip

    again = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, first=seen["records"]),
        drafter=dataclasses.replace(config.drafter, start_from=str(export), always=()),
        optim=dataclasses.replace(config.optim, total_steps=1, decay_steps=0),
    )
    second = Run(again, target, tmp_path / "second")
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
    np.testing.assert_array_equal(second.d2t, first.d2t)
    assert float(second.state.positions) == seen["positions"] and int(second.state.step) == 0
    np.testing.assert_array_equal(second._next_batch().tokens, first.records.batch([8, 9], 20).tokens)
    second.run()
    assert float(second.state.positions) > seen["positions"]

    (export / "config.json").unlink()
    resumed = Run(again, target, tmp_path / "second")
    assert int(resumed.state.step) == 1 and int(resumed.state.cursor) == 10
    np.testing.assert_array_equal(resumed.d2t, first.d2t)


def test_a_drafter_says_of_every_text_how_far_its_runs_have_read_it(tmp_path: Path) -> None:
    """Three runs, each from the drafter before: one text, another one, the first one again, this one killed and
    resumed. The last drafter names the other text and, once, the first."""
    target, config = tiny_run.target(), tiny_run.config(tmp_path)
    write_records(tmp_path / "other", [([3 + i] * 20, [False] * 4 + [True] * 16) for i in range(12)], vocab_size=24)

    def trained(name: str, start: Path | None, first: int, steps: int = 1, train: Path = config.data.train) -> Any:
        shape = config.drafter
        if start is not None:
            shape = dataclasses.replace(shape, start_from=str(start), always=())
        optim = dataclasses.replace(config.optim, total_steps=steps, decay_steps=0)
        data = dataclasses.replace(config.data, first=first, train=train)
        run = Run(dataclasses.replace(config, data=data, drafter=shape, optim=optim), target, tmp_path / name)
        run.run()
        place = run.export(tmp_path / f"{name}_{steps}", quantize=False)
        return place, json.loads((place / "config.json").read_text())["training"]

    one, first = trained("one", None, 0)
    two, second = trained("two", one, 0, train=tmp_path / "other")
    names = ("records", "text", "length", "least_learnt")
    assert second["records"] == 2 and second["earlier"] == [{name: first[name] for name in names}]
    trained("three", two, 2)
    _, third = trained("three", two, 2, steps=2)
    assert third["records"] == 6 and third["earlier"] == [{name: second[name] for name in names}]


def test_a_run_that_goes_on_refuses_settings_under_which_its_cursor_points_at_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records 0, 2, 4, ... are shorter. With fewer learnt tokens wanted the cursor would count them too; a shorter
    length counts others; another text is another text. A folder that moved, text added at its end and another held-out
    set are fine, and so is a setting that changes nothing about what was read."""
    texts = [[3 + (i + j) % 20 for j in range(20)] for i in range(12)]
    masks = [[False] * 4 + [True] * 16 if i % 2 else [False] * 12 + [True] * 8 for i in range(12)]

    def write(name: str, count: int = 12, shift: int = 0) -> Path:
        records = [([3 + (token + shift) % 20 for token in ids], mask) for ids, mask in zip(texts, masks, strict=True)]
        write_records(tmp_path / name, records[:count], vocab_size=tiny_run.VOCAB)
        return tmp_path / name

    base, target = tiny_run.config(tmp_path), tiny_run.target()

    def config(train: Path, **data: Any) -> Any:
        values: dict[str, Any] = {"train": train, "least_learnt": 10, **data}
        return dataclasses.replace(base, data=dataclasses.replace(base.data, **values))

    text, run = write("text", 10), tmp_path / "run"
    tiny_run.interrupt(Run(config(text), target, run), 2, monkeypatch)

    def refused(why: str, train: Path, **data: Any) -> None:
        with pytest.raises(ValueError, match=why):
            Run(config(train, **data), target, run)

    refused(r"text: the first 4 usable records are not .* \(data\.least_learnt: 10 -> 2\)", text, least_learnt=2)
    refused(r"data\.length: 20 -> 12; data\.least_learnt: 10 -> 0", text, length=12, least_learnt=0)
    refused(r"other: the first 4 usable .* \(another text\).*drafter\.start_from", write("other", shift=1))
    refused(r"holds another run: data\.first: 0 -> 2$", text, first=2)
    again = Run(config(write("longer"), length=19, heldout=write("held")), target, run)
    assert int(again.state.cursor) == 4
    np.testing.assert_array_equal(again._next_batch().tokens[:, 0], [3 + texts[9][0], 3 + texts[11][0]])


def test_a_draft_vocabulary_that_was_lost_comes_back_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text would count another vocabulary. A table that was exchanged is refused; where a checkpoint of an
    older version holds none, so is a missing one."""
    config, target = tiny_run.config(tmp_path), tiny_run.target()
    run, table = tmp_path / "run", tmp_path / "run" / "d2t.npy"
    first = Run(config, target, run)
    tiny_run.interrupt(first, 1, monkeypatch)
    assert first.d2t is not None
    table.unlink()
    monkeypatch.setattr(warm_start, "draft_vocabulary", None)
    again = Run(config, target, run)
    np.testing.assert_array_equal(again.d2t, first.d2t)
    np.testing.assert_array_equal(np.load(table), first.d2t)
    np.save(table, first.d2t[::-1])
    with pytest.raises(ValueError, match=r"d2t\.npy: not the draft vocabulary .*; delete the file"):
        Run(config, target, run)
    monkeypatch.setattr(Run, "_beside_the_state", lambda self: {})
    np.save(table, first.d2t)
    Run(config, target, run)
    table.unlink()
    with pytest.raises(ValueError, match=r"d2t\.npy: the draft vocabulary is missing, .* Put the file back"):
        Run(config, target, run)


def test_a_start_that_came_to_no_checkpoint_leaves_no_draft_vocabulary_behind(tmp_path: Path) -> None:
    """A table of other text, or of another size, from a start that ended before anything was saved: the next one counts
    its own."""
    config, run = tiny_run.config(tmp_path), tmp_path / "run"
    fresh = Run(config, tiny_run.target(), tmp_path / "other").d2t
    assert fresh is not None
    run.mkdir()
    for table in (fresh[::-1] + 1, fresh[:12]):
        np.save(run / "d2t.npy", table)
        np.testing.assert_array_equal(Run(config, tiny_run.target(), run).d2t, fresh)
        np.testing.assert_array_equal(np.load(run / "d2t.npy"), fresh)


def test_chunks_that_fit_the_training_blocks_alone_do_not_stop_the_evaluation(tmp_path: Path) -> None:
    """Six blocks of three widths fall into two parts of the same widths; the held-out five do not."""
    config = tiny_run.config(tmp_path)
    data = dataclasses.replace(config.data, anchors=12, heldout_anchors=5, heldout_widths=(3, 2))
    config = dataclasses.replace(config, data=data, loss=dataclasses.replace(config.loss, chunks=2))
    assert Run(config, tiny_run.target(), tmp_path / "run").evaluate()["width_3"]["blocks"] > 0


def test_the_rate_of_tokens_counts_no_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of 16 tokens in sequences of 20, two a step, 4 s each."""
    write_records(tmp_path / "train", [([5] * 16, [False] * 4 + [True] * 12)] * 8, vocab_size=tiny_run.VOCAB)
    config = tiny_run.config(tmp_path)
    log_steps, counted = Run._log_steps, []
    monkeypatch.setattr(Run, "_log_steps", lambda self, *a: counted.append(a[3]) or log_steps(self, *a[:2], 4.0, a[3]))
    texts = []
    monkeypatch.setattr(Progress, "advance", lambda self, n, text="": texts.append(text))
    Run(config, tiny_run.target(), tmp_path / "run").run()
    assert counted == [32] * 4 and all(text.endswith(", 8 tokens/s") for text in texts)
    assert all(line["seconds_per_step"] == 4.0 for line in _lines(tmp_path / "run"))


def test_starting_from_a_drafter_warns_where_text_would_be_repeated_or_passed_over_unread(tmp_path: Path) -> None:
    """What the drafter read is its first two records of the tiny run's text."""
    config = tiny_run.config(tmp_path)
    records = Records(config.data.train)

    def read(train: Records = records, **data: Any) -> ReadText:
        settings = dataclasses.replace(config.data, **data)
        return ReadText(train, train.usable(settings.length, settings.least_learnt), settings)

    known = read().identity(2)
    assert read().doubt(known, 2) is None and read().doubt(known, 6) is None
    assert "has read the first 2 usable records of" in str(read().doubt(known, 0))
    assert "text is repeated unless data.first = 2" in str(read().doubt(known, 1))
    write_records(tmp_path / "other", [([5] * 20, [True] * 20)] * 4, vocab_size=24)
    other = Records(tmp_path / "other")
    assert read(other).doubt(known, 0) is None
    assert "passes over records of" in str(read(other).doubt(known, 2))
    assert "(with length = 20, least_learnt = 2)" in str(read(other).doubt(known, 2))
    # Cut in another way it is the same text: four of its records have 13 learnt tokens, three of them before record 5.
    write_records(
        tmp_path / "mixed", [([5] * 20, [i < 13 if k in (0, 2, 4, 7) else i < 5 for i in range(20)]) for k in range(8)],
        vocab_size=24,
    )  # fmt: skip
    mixed = Records(tmp_path / "mixed")
    once = read(mixed, least_learnt=13).identity(3)
    assert read(mixed, least_learnt=13).read_of(once) == 3 and read(mixed, least_learnt=2).read_of(once) == 5
    assert read(other).read_of(once) is None and "unless data.first = 5" in str(read(mixed).doubt(once, 3))
    both = {**read(other).identity(4), "earlier": [known, "nonsense"]}
    assert texts_read(both) == [read(other).identity(4), known]
    assert read(other).doubt(both, 4) is None and "unless data.first = 4" in str(read(other).doubt(both, 2))
    assert read().doubt(both, 2) is None and "unless data.first = 2" in str(read().doubt(both, 0))
    assert read().doubt({"records": "many", "text": known["text"]}, 0) is None and read().doubt({}, 3) is None


def test_a_drafter_of_another_shape_or_of_no_place_is_no_beginning(tmp_path: Path) -> None:
    """What differs is listed, and no checkpoint of the run that was asked for is left behind."""
    target, config = tiny_run.target(), tiny_run.config(tmp_path)
    export = Run(config, target, tmp_path / "first").export(tmp_path / "drafter")

    def begin(name: str, **changes: Any) -> None:
        shape = dataclasses.replace(config.drafter, start_from=name, **changes)
        Run(dataclasses.replace(config, drafter=shape), target, tmp_path / "second")

    with pytest.raises(ValueError, match=r"drafter\.start_from: .*markov_rank: 4, the run has 2"):
        begin(str(export), markov_rank=2)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        begin(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="first must be 0 or more records, found -1"):
        dataclasses.replace(config.data, first=-1)
    assert not (tmp_path / "second" / "config.json").exists()


def test_what_a_drafter_brings_and_a_run_cannot_begin_with_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of its own gives way to the target's rows, with a warning. Positions that are no number count as none.
    N-gram tables are refused before a target is loaded."""
    target, config = tiny_run.target(), tiny_run.config(tmp_path)
    first = Run(config, target, tmp_path / "first")
    params = jax.tree.map(np.asarray, first.params)
    head = np.ones((20, 16), np.float32)
    export = write_deepspec(
        tmp_path / "drafter", first.drafter, params, drafter_specs(first.drafter), d2t=first.d2t, head=head,
        extra_config={"training": {"positions": "many"}},
    )  # fmt: skip

    def starting(place: Path) -> Any:
        return dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, start_from=str(place)))

    second = Run(starting(export), target, tmp_path / "second")
    assert "has its own lm_head.weight, which the run does not take over" in caplog.text
    assert float(second.state.positions) == 0.0
    (export / "config.json").write_text(json.dumps({"method": ngrams.METHOD}))
    with pytest.raises(ValueError, match=r"drafter\.start_from: .*: n-gram tables have no parameters to train"):
        read_input(starting(export), tmp_path / "third", target.config)
