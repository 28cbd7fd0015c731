"""A calibration from configuration to files with scripted models; killed it goes on, and requests find tables."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import Calibration, CalibrationTables, load_tables
from dspark_jax.calibrate.assess import diagram, doubts
from dspark_jax.config import Sampling
from dspark_jax.config_toml import load_toml
from dspark_jax.engine.policy import Corrections
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import RAW
from dspark_jax.evaluate import calibration, command, figures
from dspark_jax.evaluate.calibration import CalibrateConfig, CalibrationRun, TableConfig
from dspark_jax.evaluate.config import DecodeConfig, Suite
from dspark_jax.evaluate.recorder import Blocks
from dspark_jax.generate import generate
from dspark_jax.schedule import StepTimeTable
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget
from dspark_jax.whole_file import DiskFull

VOCAB, BLOCK = 5, 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def case(tmp_path: Path, monkeypatch: Any) -> tuple[CalibrateConfig, tuple[Any, Any]]:
    """Confidences are logits of a half of the truth: too low, so that the fit has something to do."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB + 1, VOCAB))
    draft = table + 1.5 * rng.normal(size=(BLOCK, VOCAB + 1, VOCAB))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (table, draft))
    overlap = np.minimum(p, q).sum(-1)
    models = (
        ScriptedTarget(jnp.asarray(table), max_positions=64),
        ScriptedDrafter(jnp.asarray(draft), jnp.asarray(np.log(overlap / (1 - overlap)) / 2), vocab_size=VOCAB),
    )
    for name, count in (("fit", 5), ("held", 2)):
        lines = (json.dumps({"prompt_ids": [i % VOCAB] * (1 + i % 2)}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "drafter").mkdir()
    monkeypatch.setattr(calibration, "find_drafter", Path)
    monkeypatch.setattr(calibration, "fingerprint", str)
    config = CalibrateConfig(
        target="scripted",
        drafter=str(tmp_path / "drafter"),
        fit=(Suite("fit", tmp_path / "fit.jsonl"),),
        heldout=(Suite("held", tmp_path / "held.jsonl"),),
        tables=(TableConfig("rejection_t1", 1.0), TableConfig("greedy", 0.0)),
        decode=DecodeConfig(max_new_tokens=20, max_num_seqs=3, max_model_len=40),
    )
    return config, models


@pytest.fixture
def decoded(monkeypatch: Any) -> None:
    """Every batch has the same four blocks, decoded by nobody; no figures."""
    confidence, accepted = np.zeros((4, BLOCK), np.float32), np.array([0, 1, 2, 2], np.int32)
    blocks = Blocks(confidence, accepted, np.full((4, BLOCK), 0.5, np.float32), np.zeros(4, np.int32))
    monkeypatch.setattr(calibration, "_decode_batch", lambda *a: blocks)
    monkeypatch.setattr(CalibrationRun, "_recorder", lambda self, table: object())
    monkeypatch.setattr(calibration.figures, "reliability", lambda *a: True)


@pytest.mark.slow
def test_a_calibration_writes_tables_and_resumes(case: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Two batches of the fit, one held out, for each table. Where one of them is lost, it alone is decoded again and
    every number stays; the file beside the weights is read like the engine reads it."""
    config, models = case
    first = CalibrationRun(config, tmp_path / "out", models).run()
    assert list(first) == ["rejection_t1", "greedy"] and first["greedy"]["fit"]["auc_ceiling"] == [1.0, 1.0]
    assert first["rejection_t1"]["fit"]["blocks"] > 20 and first["rejection_t1"]["heldout"]["blocks"] > 5
    tables = load_tables(tmp_path / "drafter" / "calibration.json", positions=BLOCK)
    assert [(t.verification, t.sampling_temperature) for t in tables] == [("rejection", 1.0), ("rejection", 0.0)]
    picked = tables.pick("rejection", 0.7)
    assert picked is not None and np.round(picked.temperature, 4).tolist() == first["rejection_t1"]["temperature"]
    content = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert content["temperatures"] == content["tables"][0]["temperatures"]
    assert "rejection_t1, heldout" in (tmp_path / "out" / "calibration_report.md").read_text()
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "out" / "reliability_greedy_heldout.png").read_bytes()[:4] == b"\x89PNG"

    lost = tmp_path / "out" / "records" / "greedy" / "fit" / "00001.npz"
    lost.rename(lost.with_suffix(".tmp"))  # as a kill before the last rename leaves it
    decoded = []
    decode_batch = calibration._decode_batch
    monkeypatch.setattr(calibration, "_decode_batch", lambda *a: decoded.append(a[2]) or decode_batch(*a))
    assert CalibrationRun(config, tmp_path / "out", models).run() == first
    assert decoded == [3]


def test_records_of_something_else_are_refused_with_what_differs_and_the_remedy(case: Any, tmp_path: Path) -> None:
    """Seed, rule or temperature of a table, and the prompts' own tokens: whatever decides the records. A table may be
    added, and a set may move."""
    config, models = case
    out = tmp_path / "out"
    CalibrationRun(config, out, models)

    def refused(why: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=r"records\.json: .* something else: " + why + "; give another folder, or"):
            CalibrationRun(dataclasses.replace(config, **changes), out, models)

    refused(r"decode\.seed: 0 -> 3", decode=dataclasses.replace(config.decode, seed=3))
    refused(r"tables\.greedy\.temperature: 0\.0 -> 0\.5", tables=(TableConfig("greedy", 0.5),))
    refused(r"fit\.fit\.prompts: 5 -> 2; fit\.fit\.tokens: .*", fit=(Suite("fit", config.fit[0].path, 2),))
    more = (*config.tables, TableConfig("coupled_t1", 1.0, "coupled"))
    CalibrationRun(dataclasses.replace(config, tables=more), out, models)
    CalibrationRun(config, out, models)
    refused("tables.coupled_t1.verification: 'coupled' -> 'rejection'", tables=(TableConfig("coupled_t1", 1.0),))

    held = config.heldout[0].path
    moved = held.rename(tmp_path / "moved.jsonl")
    CalibrationRun(dataclasses.replace(config, heldout=(Suite("held", moved),)), out, models)
    held.write_text(moved.read_text().replace("[1, 1]", "[1, 2]"))
    refused("heldout.held.tokens: .*")


def test_prompts_of_another_tokenizer_are_refused_by_line(case: Any, tmp_path: Path) -> None:
    """A token that the target does not have would be read as its last one."""
    config, models = case
    (tmp_path / "held.jsonl").write_text('{"prompt_ids": [1]}\n{"prompt_ids": [1, 5]}\n')
    with pytest.raises(ValueError, match=r"held\.jsonl:2: token id 5, but the target has 5 tokens"):
        CalibrationRun(config, tmp_path / "out", models)


def test_a_header_of_records_that_a_full_disk_cut_off_is_named(case: Any, tmp_path: Path) -> None:
    config, models = case
    CalibrationRun(config, tmp_path / "out", models)
    header = tmp_path / "out" / "records.json"
    header.write_text(header.read_text()[:40])
    with pytest.raises(ValueError, match=r"records\.json: does not say what the records .* or delete this one"):
        CalibrationRun(config, tmp_path / "out", models)


def test_temperatures_that_records_do_not_decide_are_named() -> None:
    """400 blocks: position 1 has 200 of each; of the 200 left 160 pass position 2, 40 do not. The temperature of
    position 3 is the grid's largest."""
    accepted = np.repeat([0, 1, 2, 3], [200, 40, 60, 100])
    labels = (accepted[:, None] > np.arange(3)).astype(float)
    found = doubts(Calibration(np.array([1.0, 2.0, 4.0])), labels)
    assert len(found) == 2
    assert found[0].startswith("position 2: its temperature 2 rests on 160 accepted and 40 rejected blocks; 50 of each")
    assert found[1].startswith("position 3: its temperature 4 is an end of the grid")


def test_the_report_shows_counts_shares_of_the_ceiling_and_warnings() -> None:
    values = {"blocks": 9, "auc_ceiling": [1.0, None], "accepted": [5, 0], "least_auc_of_ceiling": 0.875}
    table = {"temperature": [1.0, 4.0], "sampling_temperature": 0.0, "warnings": ["position 2: no"], "fit": values}
    text = calibration.markdown({"greedy": table})
    assert (
        "## greedy, fit: 9 blocks" in text and "| accepted | 5 | 0 |" in text and "| auc ceiling | 1.0000 |  |" in text
    )
    assert "- greedy, position 2: no" in text and "share of its ceiling (the AUC of 1 - TV itself): 0.875." in text
    assert "At temperature 0 that ceiling is 1 by construction" in text
    assert "At temperature 0" not in calibration.markdown({"t1": {**table, "sampling_temperature": 1.0}})


def test_a_reliability_diagram_draws_predicted_against_observed_survival(monkeypatch: Any) -> None:
    """Four blocks, two positions, by hand: of confidences 0.8 three of four were accepted, with T = 2 they are 2/3; of
    the second position's, a half each, one block survived. One panel a position, beside the diagonal."""
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda path, columns, rows, draw: drawn.append((columns, rows, draw)) or True)
    logits = np.array([[np.log(4.0), 0.0]] * 4)
    labels = np.array([[1, 1], [1, 0], [1, 0], [0, 0]])
    assert figures.reliability(Path("x.png"), "greedy", diagram(logits, labels, np.array([2.0, 1.0]), 2))
    ((columns, rows, draw),) = drawn
    assert (columns, rows) == (2, 1)
    axes = np.array([[Mock(), Mock()]])
    for ax in axes.flat:
        ax.plot.return_value = (Mock(),)
    draw(axes)
    for ax, before, after, observed in ((axes[0][0], 0.8, 2 / 3, 0.75), (axes[0][1], 0.4, 1 / 3, 0.25)):
        lines = [[np.asarray(values) for values in call.args] for call in ax.plot.call_args_list]
        for line, points in zip(lines, ([[0, 1], [0, 1]], [[before], [observed]], [[after], [observed]]), strict=True):
            np.testing.assert_allclose(line, points)
        assert [call.kwargs.get("label") for call in ax.plot.call_args_list] == [None, "before", "after"]
        np.testing.assert_allclose([call.kwargs["s"] for call in ax.scatter.call_args_list], [[100.0]] * 2)
    assert axes[0][1].set_title.call_args.args == ("greedy: position 2",)


def test_a_calibration_that_cannot_be_installed_stops_with_the_installed_file_as_it_was(
    case: Any, decoded: None, tmp_path: Path, monkeypatch: Any
) -> None:
    """The drafter lies on a full disk, or where nothing may be written."""
    config, models = case
    installed = tmp_path / "drafter" / "calibration.json"
    Calibration(np.full(BLOCK, 2.0)).save(installed)
    before, write = installed.read_bytes(), Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.parent == installed.parent:
            write(self, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFull, match=r"drafter/calibration\.json: no space left on the disk; .* as it was"):
        CalibrationRun(config, tmp_path / "out", models).run()
    assert installed.read_bytes() == before and [p.name for p in installed.parent.iterdir()] == ["calibration.json"]

    def refused(self: Path, content: bytes) -> int:
        if self.parent == installed.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(
        ValueError, match=r"calibration\.json cannot be written \(Permission denied\); .*install = false"
    ):
        CalibrationRun(config, tmp_path / "out", models).run()
    assert len(load_tables(tmp_path / "out" / "calibration.json")) == 2
    assert (tmp_path / "out" / "calibration_report.md").is_file() and installed.read_bytes() == before


def test_tables_that_are_added_one_by_one_stay_and_those_that_go_are_named(
    case: Any, decoded: None, tmp_path: Path, caplog: Any
) -> None:
    """Two calls of one folder leave two tables; the drafter's own third one, of other records, goes and is said. A
    temperature that no request picks is said as well."""
    config, models = case
    installed = tmp_path / "drafter" / "calibration.json"
    Calibration(np.full(BLOCK, 2.0), verification="coupled").save(installed)

    def keys(*tables: TableConfig) -> list[tuple[str, float]]:
        CalibrationRun(dataclasses.replace(config, tables=tables), tmp_path / "out", models).run()
        return [(table.verification, table.sampling_temperature) for table in load_tables(installed)]

    with caplog.at_level(logging.WARNING):
        assert keys(config.tables[0]) == [("rejection", 1.0)]
    assert "calibration.json: its tables for coupled at T = 1 are not among these and go" in caplog.text
    caplog.clear()
    assert keys(config.tables[1]) == [("rejection", 0.0), ("rejection", 1.0)]
    assert "its tables" not in caplog.text and "no request picks it" not in caplog.text
    keys(TableConfig("warm", 0.7))
    assert "warm: a table of T = 0.7 is written and measured, but no request picks it" in caplog.text


def test_a_shifted_table_is_fitted_beside_the_papers_and_measured(
    case: Any, decoded: None, tmp_path: Path, caplog: Any
) -> None:
    """Of four blocks three are accepted at position 1 where the head says one half: only a shift says three quarters.
    Both tables are in the report and the file; without the setting the shifted one goes, and that is said."""
    config, models = case
    config = dataclasses.replace(config, tables=config.tables[:1], bins=1)

    def run(shift: bool) -> dict[str, Any]:
        return CalibrationRun(dataclasses.replace(config, shift=shift), tmp_path / "out", models).run()

    found = run(True)
    assert list(found) == ["rejection_t1", "rejection_t1_shifted"]
    plain, shifted = found["rejection_t1"], found["rejection_t1_shifted"]
    assert "shift" not in plain and shifted["shift"] > 0
    assert plain["heldout"]["ece_after"][0] == pytest.approx(0.25) and shifted["heldout"]["ece_after"][0] < 0.02
    assert plain["heldout"]["ece_before"] == shifted["heldout"]["ece_before"]
    report = (tmp_path / "out" / "calibration_report.md").read_text()
    assert f"| shift | {shifted['shift']:.3f} | {shifted['shift']:.3f} |" in report
    tables = load_tables(tmp_path / "drafter" / "calibration.json")
    assert [table.shift for table in tables] == [None, pytest.approx(shifted["shift"])]
    assert run(True) == found and len(load_tables(tmp_path / "drafter" / "calibration.json")) == 2
    with caplog.at_level(logging.WARNING):
        assert run(False) == {"rejection_t1": plain}
    words = "its tables for rejection at T = 1 with a shift are not among these and go; name them in tables (and shift"
    assert words in caplog.text and "better without" not in caplog.text
    assert [table.shift for table in load_tables(tmp_path / "drafter" / "calibration.json")] == [None]


def test_a_shift_that_its_records_do_not_decide_or_that_does_not_help_is_said(
    case: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """All blocks of the fit are accepted where the head says one half, none of the held-out ones: no candidate is large
    enough, and the smallest would have been better."""
    config, models = case

    def batch(recorder: Any, tasks: Any, first: int, rows: int) -> Blocks:
        accepted = np.full(4, BLOCK if tasks[0].suite == "fit" else 0, np.int32)
        return Blocks(
            np.zeros((4, BLOCK), np.float32), accepted, np.full((4, BLOCK), 0.5, np.float32), np.zeros(4, int)
        )

    monkeypatch.setattr(calibration, "_decode_batch", batch)
    monkeypatch.setattr(CalibrationRun, "_recorder", lambda self, table: object())
    monkeypatch.setattr(calibration.figures, "reliability", lambda *a: True)
    config = dataclasses.replace(config, tables=config.tables[:1], shift=True)
    with caplog.at_level(logging.WARNING):
        found = CalibrationRun(config, tmp_path / "out", models).run()["rejection_t1_shifted"]
    assert found["shift"] == 1.0
    assert "its shift 1 is an end of the candidates" in found["warnings"][0]
    assert found["warnings"][-1] == "its largest error over heldout is 0.982, without a shift 0.5: better without"
    assert found["warnings"][-1] in (tmp_path / "out" / "calibration_report.md").read_text()
    assert all(line in caplog.text for line in found["warnings"])


def test_a_target_whose_weights_were_replaced_is_another_one(case: Any, tmp_path: Path) -> None:
    """Under the same name and for the same drafter."""
    config, (target, drafter) = case
    CalibrationRun(config, tmp_path / "out", (target, drafter))
    other = target.replace(table=target.table + 1.0)
    with pytest.raises(ValueError, match=r"records\.json: .* something else: weights: '\w+' -> '\w+'; give another"):
        CalibrationRun(config, tmp_path / "out", (other, drafter))


def test_a_command_that_meets_a_full_disk_ends_with_status_3_and_one_line(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The command that calibrating and evaluating have in common."""
    monkeypatch.setattr(command, "keep_programs_in", lambda folder: None)
    monkeypatch.setattr(command, "begin_logging", lambda: None)

    def full(config: Any, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    argv = ["--config", str(ROOT / "configs/calibrate/smollm2.toml"), "--out", str(tmp_path / "out")]
    assert command.command(argv, "", CalibrateConfig, full, "report.md") == 3
    error = capsys.readouterr().err
    assert error.startswith("stopped: ") and error.count("\n") == 1
    assert "out: no space left on the disk; records made so far are kept" in error


def test_the_held_out_sets_have_their_own_number_of_blocks_and_old_records_are_all_used(
    case: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Batches of 4 blocks: 4 wanted of the fit is one batch of its two, 8 wanted of the other sets is two of them.
    Where the folder holds more than is wanted now, nothing is decoded and nothing is thrown away."""
    config, models = case
    prompts = "".join(json.dumps({"prompt_ids": [1]}) + "\n" for _ in range(9))
    (tmp_path / "held.jsonl").write_text(prompts)
    decoded = []

    def batch(recorder: Any, tasks: Any, first: int, rows: int) -> Blocks:
        decoded.append((tasks[0].suite, first))
        confidence, accepted = np.zeros((4, BLOCK), np.float32), np.array([0, 1, 2, 2], np.int32)
        return Blocks(confidence, accepted, np.full((4, BLOCK), 0.5, np.float32), np.full(4, first))

    monkeypatch.setattr(calibration, "_decode_batch", batch)
    monkeypatch.setattr(CalibrationRun, "_recorder", lambda self, table: object())
    monkeypatch.setattr(calibration.figures, "reliability", lambda *a: True)
    config = dataclasses.replace(config, tables=config.tables[:1], blocks=4, heldout_blocks=8, install=False)
    first = CalibrationRun(config, tmp_path / "out", models).run()["rejection_t1"]
    assert decoded == [("fit", 0), ("held", 0), ("held", 3)]
    assert (first["fit"]["blocks"], first["heldout"]["blocks"]) == (4, 8)
    fewer = dataclasses.replace(config, heldout_blocks=1)
    assert CalibrationRun(fewer, tmp_path / "out", models).run()["rejection_t1"] == first and len(decoded) == 3


def test_a_drafter_without_a_confidence_head_is_refused(case: Any, tmp_path: Path) -> None:
    config, (target, drafter) = case
    with pytest.raises(ValueError, match="no confidence head"):
        CalibrationRun(config, tmp_path / "out", (target, drafter.replace(confidence=None)))


def test_the_engine_picks_by_request_and_logs_a_missing_table_once(tmp_path: Path, caplog: Any) -> None:
    """Tables for rejection at T = 1 and for T = 0: a coupled request at T = 0.7 has none."""
    for name, rule, t, value in (("a", "rejection", 1.0, 2.0), ("b", "rejection", 0.0, 3.0)):
        Calibration(np.full(BLOCK, value), verification=rule, sampling_temperature=t).save(tmp_path / name)
    tables = [next(iter(load_tables(tmp_path / name))) for name in ("a", "b")]
    corrections = Corrections(CalibrationTables(tuple(tables)), BLOCK)

    def of(temperature: float, coupled: bool) -> Any:
        return corrections.of(Checked((1,), 4, Sampling(temperature), None, coupled, ()))

    with caplog.at_level(logging.WARNING):
        assert [of(t, coupled).temperature[0] for t, coupled in ((0.7, False), (0.0, False), (0.0, True))] == [2, 3, 3]
        assert not caplog.records
        assert of(0.7, True) == RAW and of(1.0, True) == RAW
    assert len(caplog.records) == 1 and "coupled" in caplog.text and "raw confidences" in caplog.text


def test_generate_logs_a_missing_table(case: Any, caplog: Any) -> None:
    _, (target, drafter) = case
    table = Calibration(jnp.ones(BLOCK), verification="rejection", sampling_temperature=0.0)
    with caplog.at_level(logging.WARNING):
        generate(
            target,
            drafter,
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            seeds=jnp.zeros(1, jnp.uint32),
            max_new_tokens=2,
            admit="early_stop",
            step_time=StepTimeTable(tokens=[1, 2, 3], milliseconds=[1.0, 1.1, 1.2]),
            calibration=CalibrationTables((table,)),
        )
    assert "no calibration table for rejection at temperature 1" in caplog.text


def test_generate_admits_by_shifted_confidences(case: Any) -> None:
    """Steps that hardly cost more with drafts: all are offered, and none where a shift of -30 makes them hopeless."""
    _, models = case
    table = StepTimeTable(tokens=[1, 2, 3], milliseconds=[1.0, 1.01, 1.02])

    def offered(calibration: Calibration) -> np.ndarray:
        found = generate(
            *models,
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
            seeds=jnp.zeros(1, jnp.uint32),
            max_new_tokens=8,
            admit="early_stop",
            step_time=table,
            calibration=calibration,
        )
        return np.asarray(found.offered)

    assert offered(Calibration(np.ones(BLOCK), shift=0.0)).max() == BLOCK
    assert offered(Calibration(np.ones(BLOCK), shift=-30.0)).max() == 0


def test_the_shipped_configuration_loads_and_mistakes_are_named(case: Any) -> None:
    shipped = load_toml(ROOT / "configs" / "calibrate" / "smollm2.toml", CalibrateConfig, ["install=false"])
    assert [t.name for t in shipped.tables] == ["rejection_t1", "coupled_t1", "greedy"] and not shipped.install
    for change, why in (
        ("bins=0", "bins must be positive"),
        ("heldout_blocks=-1", "blocks 0 or more"),
        ("fit=[]", "fit must name"),
        ("fit=[{name='a', path='b'}, {name='a', path='c'}]", "fit: names must differ, found a, a"),
        ("tables=[{name='a', temperature=1}, {name='b', temperature=1}]", "tables must be there and differ"),
        ("tables=[{name='a', temperature=-1}]", "temperature must be"),
        ("tables=[{name='a', temperature=1}, {name='a_shifted', temperature=0}]", "'a_shifted' is the name of another"),
        ("speed=1", "unknown key speed"),
    ):
        with pytest.raises(ValueError, match=why):
            load_toml(ROOT / "configs" / "calibrate" / "smollm2.toml", CalibrateConfig, [change])
