"""Calibrates a drafter from real decoding: records, temperatures, measures, figures. Resumable batch by batch."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dspark_jax import load_drafter, load_target
from dspark_jax.calibrate import Calibration, fit, load_tables, save_tables
from dspark_jax.calibrate.assess import assess, diagram, doubts
from dspark_jax.calibrate.sts import SHIFTS
from dspark_jax.checkpoint.drafter_files import CALIBRATION_FILE
from dspark_jax.config import Sampling
from dspark_jax.data.line_file import differences, known
from dspark_jax.evaluate import figures
from dspark_jax.evaluate.config import DecodeConfig, Suite
from dspark_jax.evaluate.decode import NEWER, digest, fingerprint
from dspark_jax.evaluate.recorder import Blocks, Recorder
from dspark_jax.evaluate.report import table as markdown_table
from dspark_jax.evaluate.suites import Task, load_tasks
from dspark_jax.load import check_drafter, find_drafter
from dspark_jax.progress import Progress
from dspark_jax.targets import stop_ids, weights_digest
from dspark_jax.types import GREEDY_TEMPERATURE
from dspark_jax.whole_file import full_disk_is_said, is_disk_full, write_whole

LOG = logging.getLogger("dspark_jax.calibrate")
HEADER = "records.json"
ADVISED_BLOCKS = 10_000
"""Below it the noise of an ECE of 10 bins is of the size of what is measured."""


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One table: the rule and temperature its records are decoded with."""

    name: str
    temperature: float
    verification: Literal["rejection", "coupled"] = "rejection"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"a table needs a name without /, found {self.name!r}")
        Sampling(self.temperature)

    @property
    def picked(self) -> bool:
        """Requests pick it (``CalibrationTables.pick``)."""
        return self.temperature == 1.0 or self.temperature < GREEDY_TEMPERATURE


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """Everything that decides a calibration but its folder.

    Attributes:
        fit: prompt sets the temperatures are fitted on.
        heldout: sets of another domain that they are measured on; none: measured on the fit's own records only.
        tables: by default the three that requests pick from (DESIGN section 9).
        blocks: records of ``fit`` that are enough for a table; 0: all prompts are decoded. Records that lie in the
            folder already are used beyond it.
        heldout_blocks: the same of ``heldout``; 0: as ``blocks``.
        shift: fit a second table beside each, with a number that is added to all logits first (``calibrate.tables``);
            the engine takes it before the other.
        bins: of the fit's calibration error. report_bins: of the reported one.
        install: write calibration.json beside the drafter's weights, too.
    """

    target: str
    drafter: str
    fit: tuple[Suite, ...]
    heldout: tuple[Suite, ...] = ()
    tables: tuple[TableConfig, ...] = (
        TableConfig("rejection_t1", 1.0),
        TableConfig("coupled_t1", 1.0, "coupled"),
        TableConfig("greedy", 0.0),
    )
    decode: DecodeConfig = DecodeConfig()
    blocks: int = 0
    heldout_blocks: int = 0
    shift: bool = False
    bins: int = 20
    report_bins: int = 10
    install: bool = True

    def __post_init__(self) -> None:
        keys = [(t.verification, t.temperature) for t in self.tables]
        if not self.tables or len(set(keys)) < len(keys) or len({t.name for t in self.tables}) < len(keys):
            raise ValueError("tables must be there and differ in name, and in rule or temperature")
        names = {t.name for t in self.tables}
        if self.shift and (taken := names & {shifted_name(name) for name in names}):
            raise ValueError(f"tables: with shift = true {min(taken)!r} is the name of another one's shifted table")
        if not self.fit:
            raise ValueError("fit must name at least one prompt set")
        for what, suites in (("fit", self.fit), ("heldout", self.heldout)):
            if len({suite.name for suite in suites}) < len(suites):
                raise ValueError(f"{what}: names must differ, found {', '.join(suite.name for suite in suites)}")
        if min(self.bins, self.report_bins) < 1 or min(self.blocks, self.heldout_blocks) < 0:
            found = (self.bins, self.report_bins, self.blocks, self.heldout_blocks)
            raise ValueError(f"bins must be positive and blocks 0 or more, found {', '.join(map(str, found))}")


class CalibrationRun:
    """One calibration in one folder: ``run()`` decodes what is missing, fits, and writes everything."""

    def __init__(self, config: CalibrateConfig, folder: str | Path, models: tuple[Any, Any] | None = None) -> None:
        self.config, self.folder = config, Path(folder)
        if models is None:
            check_drafter(config.drafter)
            target = load_target(config.target, dtype=config.decode.dtype)
            models = target, load_drafter(config.drafter, target, dtype=config.decode.dtype)
        self.target, self.drafter = models
        if not self.drafter.has_confidence:
            raise ValueError(f"{config.drafter}: this drafter has no confidence head, there is nothing to calibrate")
        sets = {"fit": config.fit, "heldout": config.heldout}
        self.tasks = {
            name: load_tasks(suites, self.target, config.decode) if suites else [] for name, suites in sets.items()
        }
        self._check_folder()

    def _check_folder(self) -> None:
        """Records belong to one drafter, one way of decoding, the tables and the prompts they were decoded for; a
        table may be added to those of a folder."""
        config, path = self.config, self.folder / HEADER
        mine: dict[str, Any] = {
            "target": config.target,
            "weights": weights_digest(self.target),
            "drafter": fingerprint(find_drafter(config.drafter)),
            "decode": dataclasses.asdict(config.decode),
            "tables": {t.name: {"verification": t.verification, "temperature": t.temperature} for t in config.tables},
        }
        for name, suites in (("fit", config.fit), ("heldout", config.heldout)):
            mine[name] = {suite.name: _contents(self.tasks[name], suite) for suite in suites}
        old, fitted = _read_header(path), self.folder / CALIBRATION_FILE
        # Tables that were added one by one: those of earlier calls, of the same drafter and records, stay.
        self._earlier = list(load_tables(fitted)) if old is not None and fitted.is_file() else []
        if old is not None:
            tables = old.get("tables", {})
            mine["tables"] = {**tables, **mine["tables"]}
            wrong = differences({**old, "tables": {**mine["tables"], **tables}}, known(mine, old, NEWER))
            if wrong:
                raise ValueError(
                    f"{path}: the records of this folder are of something else: {'; '.join(wrong)}; give another "
                    "folder, or delete this one to decode anew"
                )
        if old != mine:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(mine, indent=1) + "\n")

    def run(self) -> dict[str, Any]:
        """Returns the measures that were written, by table and list of sets."""
        fitted, measures = [], {}
        for table in self.config.tables:
            if not table.picked:
                LOG.warning(
                    "%s: a table of T = %g is written and measured, but no request picks it: they take the one of "
                    "T = 1 of their rule, or that of T = 0",
                    table.name,
                    table.temperature,
                )
        with Progress(len(self.config.tables) * sum(map(len, self.tasks.values())), "calibrate", unit="prompt") as bar:
            for table in self.config.tables:
                records = {name: self.record(table, name, bar) for name, tasks in self.tasks.items() if tasks}
                kinds: dict[str, Sequence[float]] = {table.name: ()}
                if self.config.shift:
                    kinds[shifted_name(table.name)] = SHIFTS
                for name, shifts in kinds.items():
                    calibration = fit(
                        records["fit"].confidence,
                        records["fit"].labels,
                        self.config.bins,
                        verification=table.verification,
                        sampling_temperature=table.temperature,
                        shifts=shifts,
                    )
                    fitted.append(calibration)
                    measures[name] = self._measure(name, calibration, records)
                if self.config.shift:
                    self._compare(table.name, measures)
        fitted += _others(self._earlier, fitted)
        written = [self.folder / CALIBRATION_FILE]
        if self.config.install:
            written.append(find_drafter(self.config.drafter) / CALIBRATION_FILE)
        write_whole(self.folder / "calibration_report.json", json.dumps(measures, indent=1) + "\n")
        write_whole(self.folder / "calibration_report.md", markdown(measures))
        for path in written:
            words = f"{path}: no space left on the disk; what was there is as it was. Make room and start again"
            with full_disk_is_said(words):
                self._install(path, fitted)
        return measures

    def _install(self, path: Path, fitted: Sequence[Calibration]) -> None:
        """Writes the tables. Raises ValueError where nothing may be written there; OSError where there is no room."""
        if lost := _lost(path, fitted):
            LOG.warning(
                "%s: its tables for %s are not among these and go; name them in tables (and shift = true) to keep such",
                path,
                lost,
            )
        try:
            save_tables(path, fitted)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ValueError(
                f"{path} cannot be written ({error.strerror}); the tables are in {self.folder / CALIBRATION_FILE}: "
                "copy them there, or set install = false"
            ) from error
        LOG.info("wrote %s", path)

    def record(self, table: TableConfig, name: str, bar: Progress) -> Blocks:
        """The blocks of one table over the sets ``fit`` or ``heldout``."""
        tasks, decode = self.tasks[name], self.config.decode
        recorder: Recorder | None = None
        parts: list[Blocks] = []
        size, enough = decode.max_num_seqs, self.config.blocks
        if name == "heldout":
            enough = self.config.heldout_blocks or enough
        for number, begin in enumerate(range(0, len(tasks), size)):
            part = tasks[begin : begin + size]
            path = self.folder / "records" / table.name / name / f"{number:05d}.npz"
            if enough and sum(map(len, parts)) >= enough and not path.is_file():
                bar.advance(len(tasks) - begin)
                break
            if not path.is_file():
                recorder = recorder or self._recorder(table)
                _decode_batch(recorder, part, begin, size).save(path)
            parts.append(Blocks.load(path))
            bar.advance(len(part), f"{table.name} {name}: {sum(map(len, parts))} blocks")
        blocks = Blocks.join(parts)
        if not len(blocks):
            raise ValueError(
                f"{table.name}: no whole block in the records of {name}; give longer texts or more prompts"
            )
        if len(blocks) < ADVISED_BLOCKS:
            LOG.warning("%s: %d blocks of %s; %d or more are advised", table.name, len(blocks), name, ADVISED_BLOCKS)
        return blocks

    def _recorder(self, table: TableConfig) -> Recorder:
        longest = max(len(task.ids) for tasks in self.tasks.values() for task in tasks)
        return Recorder(
            self.target,
            self.drafter,
            sampling=Sampling(table.temperature),
            verification=table.verification,
            max_new_tokens=self.config.decode.max_new_tokens,
            longest=-(-longest // 16) * 16,
            stop_ids=stop_ids(self.target) if self.config.decode.stop_at_eos else (),
        )

    def _measure(self, table: str, calibration: Calibration, records: dict[str, Blocks]) -> dict[str, Any]:
        shift = None if calibration.shift is None else float(calibration.shift)
        found: dict[str, Any] = {
            "temperature": np.asarray(calibration.temperature).round(4).tolist(),
            **({} if shift is None else {"shift": round(shift, 4)}),
            "sampling_temperature": calibration.sampling_temperature,
            "warnings": doubts(calibration, records["fit"].labels),
        }
        for line in found["warnings"]:
            LOG.warning("%s: %s", table, line)
        for name, blocks in records.items():
            temperature, bins = calibration.temperature, self.config.report_bins
            values = assess(blocks.confidence, blocks.labels, temperature, blocks.overlap, bins, shift=shift)
            found[name] = {key: _plain(value) for key, value in values.items()}
            shown = diagram(blocks.confidence, blocks.labels, temperature, bins, shift=shift)
            figures.reliability(self.folder / f"reliability_{table}_{name}.png", f"{table}, {name}", shown)
        return found

    def _compare(self, table: str, measures: dict[str, Any]) -> None:
        """Warns of a shifted table that is no better than the one without."""
        sets = "heldout" if self.tasks["heldout"] else "fit"
        name = shifted_name(table)
        plain, shifted = (max(measures[n][sets]["ece_after"]) for n in (table, name))
        if shifted > plain:
            line = f"its largest error over {sets} is {shifted:.3g}, without a shift {plain:.3g}: better without"
            measures[name]["warnings"].append(line)
            LOG.warning("%s: %s", name, line)


def shifted_name(table: str) -> str:
    """What the shifted table beside another is called in reports."""
    return f"{table}_shifted"


def _decode_batch(recorder: Recorder, tasks: Sequence[Task], first: int, rows: int) -> Blocks:
    """Blocks of a batch; a short one is filled up to ``rows``, so that all batches share their programs."""
    filled = [*tasks, *[tasks[-1]] * (rows - len(tasks))]
    blocks, _ = recorder.batch([task.ids for task in filled], [task.seed for task in filled], first)
    own = blocks.prompt < first + len(tasks)
    return Blocks(blocks.confidence[own], blocks.accepted[own], blocks.overlap[own], blocks.prompt[own])


def _contents(tasks: Sequence[Task], suite: Suite) -> dict[str, Any]:
    """What a set contributes to its records: how many prompts, and a hash of their tokens."""
    texts = [task.ids for task in tasks if task.suite == suite.name]
    return {"prompts": len(texts), "tokens": digest(*texts)}


def _read_header(path: Path) -> dict[str, Any] | None:
    """What the records of a folder were decoded for, None where there are none. Raises ValueError naming the file."""
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: does not say what the records beside it were decoded for ({error}); give another folder, or "
            "delete this one to decode anew"
        ) from None


def _others(tables: Sequence[Calibration], than: Sequence[Calibration]) -> list[Calibration]:
    """Those for other rules or temperatures ``than`` these."""
    keys = {(t.verification, t.sampling_temperature) for t in than}
    return [t for t in tables if (t.verification, t.sampling_temperature) not in keys]


def _lost(path: Path, fitted: Sequence[Calibration]) -> str:
    """Which tables of the file the new ones do not replace; a file that is none has none."""
    try:
        there = list(load_tables(path))
    except (OSError, ValueError):
        return ""
    kept = {(t.verification, t.sampling_temperature, t.shifted) for t in fitted}
    return ", ".join(
        f"{t.verification} at T = {t.sampling_temperature:g}" + (" with a shift" if t.shifted else "")
        for t in there
        if (t.verification, t.sampling_temperature, t.shifted) not in kept
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(x) for x in value.tolist()]
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 5)
    return value


def markdown(measures: dict[str, Any]) -> str:
    """The report as text: one table for each calibration table and list of sets."""
    parts = ["# Calibration of the confidence head\n"]
    for table, found in measures.items():
        parts += [f"- {table}, {line}\n" for line in found["warnings"]]
        for name, values in found.items():
            if not isinstance(values, dict):
                continue
            width = len(found["temperature"])
            body = [["temperature", *(f"{t:.3f}" for t in found["temperature"])]]
            if "shift" in found:
                body.append(["shift", *[f"{found['shift']:.3f}"] * width])
            for key, row in values.items():
                if isinstance(row, list):
                    body.append([key.replace("_", " "), *map(_cell, row)])
            parts.append(f"## {table}, {name}: {values['blocks']} blocks\n")
            parts.append(markdown_table(["position", *map(str, range(1, width + 1))], body))
            parts.append(_ceiling(values["least_auc_of_ceiling"], found["sampling_temperature"]))
    return "\n".join(parts)


def _cell(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _ceiling(least: float | None, temperature: float) -> str:
    """What the AUC is worth against the best there could be."""
    text = "" if least is None else f"Least AUC as a share of its ceiling (the AUC of 1 - TV itself): {least:.3f}."
    if temperature < GREEDY_TEMPERATURE:
        text += " At temperature 0 that ceiling is 1 by construction: an overlap is 0 or 1, the outcome itself."
    return text.strip() + "\n"
