"""An evaluation from configuration to report; killed and started again, it goes on where it was."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

from dspark_jax import Engine, load_drafter, load_target
from dspark_jax.data.line_file import LineFile
from dspark_jax.evaluate import report
from dspark_jax.evaluate.acceptance import Sample
from dspark_jax.evaluate.confidence import sweep
from dspark_jax.evaluate.config import PLAIN, EvaluateConfig
from dspark_jax.evaluate.decode import NEWER, Job, Trace, build_engine, run_job
from dspark_jax.evaluate.suites import Task, load_tasks
from dspark_jax.load import check_drafter
from dspark_jax.progress import Progress
from dspark_jax.targets import stop_ids, weights_digest

LOG = logging.getLogger("dspark_jax.evaluate")
RECORDS = "records"


def plan(config: EvaluateConfig) -> list[Job]:
    """The jobs, by drafter: full blocks under every way of sampling, then the thresholds of those that are swept."""
    swept = set(config.threshold_runs or (config.runs[0].name,))
    jobs = [Job(run, None) for run in config.runs] if config.plain else []
    for drafter in config.drafters:
        jobs += [Job(run, drafter) for run in config.runs]
        for run in config.runs:
            if run.name in swept:
                jobs += [Job(run, drafter, threshold) for threshold in config.thresholds if threshold > 0]
    return jobs


class Evaluation:
    """One evaluation in one folder. ``run()`` decodes what is missing and writes the report."""

    def __init__(self, config: EvaluateConfig, folder: str | Path, target: Any = None) -> None:
        self.config, self.folder = config, Path(folder)
        if target is None:
            for entry in config.drafters:  # before anything that takes long
                check_drafter(entry.path)
        self.target = load_target(config.target, dtype=config.decode.dtype) if target is None else target
        self.weights = weights_digest(self.target)
        self.tasks = load_tasks(config.suites, self.target, config.decode)

    def run(self) -> dict[str, Any]:
        """All jobs, one drafter after the other. Returns the results that were written."""
        jobs = plan(self.config)
        decoded: dict[Job, list[Trace]] = {}
        drafts: dict[str, int] = {PLAIN: 0}
        with Progress(len(jobs) * len(self.tasks), "prompts", unit="prompt") as progress:
            for row in dict.fromkeys(job.row for job in jobs):
                mine = [job for job in jobs if job.row == row]
                drafter = None
                if mine[0].drafter is not None:
                    drafter = load_drafter(mine[0].drafter.path, self.target, dtype=self.config.decode.dtype)
                    drafts[row] = mine[0].drafter.num_speculative_tokens or int(drafter.block_size)
                decoded |= self._drafter(drafter, mine, progress)
        results = self._results(decoded, drafts)
        for path in report.write(self.folder, results):
            LOG.info("wrote %s", path)
        return results

    def _drafter(self, drafter: Any, jobs: list[Job], progress: Progress) -> dict[Job, list[Trace]]:
        """The jobs of one drafter. Two engines serve them all: sampling and thresholds are data."""
        decoded: dict[Job, list[Trace]] = {}
        for sweep_jobs in (False, True):
            chosen = [job for job in jobs if (job.threshold is not None) == sweep_jobs]
            if sweep_jobs and chosen and not drafter.has_confidence:
                LOG.warning("%s has no confidence head: no threshold sweep", chosen[0].row)
                progress.advance(len(chosen) * len(self.tasks))
                continue
            engine: Engine | None = None
            for job in chosen:
                with closing(self._open(job)) as file:
                    done = {(line["suite"], line["index"]) for line in file.lines}
                    known = sum(task.key in done for task in self.tasks)
                    progress.advance(known)
                    if known < len(self.tasks) and engine is None:
                        engine = self._engine(drafter, job)
                    if engine is not None:
                        engine.config = dataclasses.replace(engine.config, confidence_threshold=job.threshold or 0.0)
                    stops = stop_ids(self.target)
                    decoded[job] = run_job(engine, job, self.tasks, self.config.decode, stops, file, progress)
        return decoded

    def _open(self, job: Job) -> LineFile:
        header = job.header(self.config.target, self.weights, self.config.decode)
        return LineFile(self.folder / RECORDS / job.file, header, NEWER)

    def _engine(self, drafter: Any, job: Job) -> Engine:
        longest = max(len(task.ids) for task in self.tasks) + self.config.decode.max_new_tokens
        engine = build_engine(self.target, drafter, job, self.config.decode, longest)
        LOG.info("%s: compiling", job.row)
        engine.warmup()
        return engine

    def _results(self, decoded: dict[Job, list[Trace]], drafts: dict[str, int]) -> dict[str, Any]:
        config = self.config
        groups = {suite.name: suite.group for suite in config.suites}
        samples = {job: Sample(traces, drafts[job.row], groups) for job, traces in decoded.items()}
        runs, sweeps = {}, {}
        for run in config.runs:
            full = {job.row: job for job in decoded if job.run == run and job.threshold is None}
            runs[run.name] = report.measure(
                {name: samples[job] for name, job in full.items()},
                {name: decoded[job] for name, job in full.items()},
                config.bootstrap,
            )
            curves = {}
            for name in full:
                cuts = {job.threshold or 0.0: job for job in decoded if job.run == run and job.row == name}
                if len(cuts) > 1:
                    speeds = {cut: _speed(decoded[job]) for cut, job in cuts.items()}
                    curves[name] = sweep({cut: samples[job] for cut, job in cuts.items()}, speeds, config.bootstrap)
            if curves:
                sweeps[run.name] = curves
        return {
            "target": config.target,
            "settings": {**dataclasses.asdict(config.decode), "bootstrap": config.bootstrap},
            "drafters": [dataclasses.asdict(entry) for entry in config.drafters],
            "suites": _sizes(self.tasks),
            "runs": runs,
            "sweeps": sweeps,
        }


def _speed(traces: list[Trace]) -> float:
    seconds = sum(t.seconds for t in traces)
    return round(sum(t.emitted for t in traces) / seconds, 2) if seconds else 0.0


def _sizes(tasks: list[Task]) -> dict[str, int]:
    return {name: sum(task.suite == name for task in tasks) for name in dict.fromkeys(task.suite for task in tasks)}
