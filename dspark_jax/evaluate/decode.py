"""Decodes all tasks of an evaluation with one drafter under one way of sampling, through the serving engine."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax import Engine, EngineConfig, Request
from dspark_jax.data.line_file import LineFile
from dspark_jax.evaluate.config import PLAIN, DecodeConfig, DrafterEntry, SamplingRun
from dspark_jax.evaluate.suites import Task
from dspark_jax.load import find_drafter
from dspark_jax.progress import Progress

MAX_PROGRAMS = 12
"""Budget of compiled programs; an evaluation runs few shapes and compiles once a drafter."""

_HEAD = 1 << 20
NEWER = ("weights",)
"""What the records of earlier versions do not say."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One drafter (None: plain decoding) under one way of sampling, with or without a confidence threshold."""

    run: SamplingRun
    drafter: DrafterEntry | None
    threshold: float | None = None

    @property
    def row(self) -> str:
        """Name of the drafter."""
        return PLAIN if self.drafter is None else self.drafter.name

    @property
    def file(self) -> str:
        """Where its records are, below the folder of records."""
        cut = "" if self.threshold is None else f"@{self.threshold:g}"
        return f"{self.run.name}/{self.row}{cut}.jsonl"

    def header(self, target: str, weights: str, decode: DecodeConfig) -> dict[str, Any]:
        """What decides its records; the number of prompts does not. ``weights``: ``weights_digest`` of the target."""
        drafter = None
        if self.drafter is not None:
            drafter = {**dataclasses.asdict(self.drafter), "files": fingerprint(find_drafter(self.drafter.path))}
            del drafter["name"], drafter["path"]
        return {
            "target": target,
            "weights": weights,
            "drafter": drafter,
            "run": dataclasses.asdict(self.run),
            "decode": dataclasses.asdict(decode),
            "threshold": self.threshold,
        }


@dataclasses.dataclass(frozen=True)
class Trace:
    """What decoding one task gave."""

    suite: str
    index: int
    tokens: tuple[int, ...]  # the new ones
    committed: tuple[int, ...]  # tokens kept, one entry a cycle
    offered: tuple[int, ...]  # drafts verified, one entry a cycle
    finish: str  # stop | length
    seconds: float  # since the task before it ended
    emitted: int  # tokens of all texts in that time
    prompt: str = ""  # hash of the prompt's tokens; empty in records that are older than this field

    @classmethod
    def parse(cls, line: dict[str, Any]) -> Trace:
        """From a line of the record file."""
        lists = {name: tuple(line[name]) for name in ("tokens", "committed", "offered")}
        return cls(**{**line, **lists})


def digest(*texts: Sequence[int]) -> str:
    """Short hash of the token ids of texts, and of where each ends."""
    return hashlib.sha256(repr([list(map(int, text)) for text in texts]).encode()).hexdigest()[:16]


def fingerprint(folder: Path) -> str:
    """Short hash of a checkpoint: its config, and size and first MiB of every weight file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            digest.update(f"{path.name}:{path.stat().st_size}".encode() + file.read(_HEAD))
    return digest.hexdigest()[:16]


def build_engine(target: Any, drafter: Any, job: Job, decode: DecodeConfig, longest: int) -> Engine:
    """An engine of few programs: full blocks by default (``admit="all"``, the paper's section 5.1).

    Args:
        longest: tokens of the longest text, prompt included.
    """
    mode = "none" if drafter is None else "fixed" if job.threshold is None else "threshold"
    entry = job.drafter
    engine = Engine(
        target,
        drafter,
        EngineConfig(
            max_num_seqs=decode.max_num_seqs,
            max_model_len=-(-(longest + 1) // 64) * 64,
            mode=mode,
            num_speculative_tokens=(entry.num_speculative_tokens or None) if entry is not None else None,
            verification=job.run.verification,
            confidence_threshold=job.threshold or 0.0,
            slot_buckets=(decode.max_num_seqs,),
            max_programs=MAX_PROGRAMS,
        ),
    )
    if engine.mode != mode:
        raise ValueError(f"{job.row}: {'; '.join(engine.notes)}")
    return engine


def run_job(
    engine: Engine | None,
    job: Job,
    tasks: Sequence[Task],
    decode: DecodeConfig,
    stop_ids: Sequence[int],
    file: LineFile,
    progress: Progress,
) -> list[Trace]:
    """Decodes the tasks that ``file`` has no record of, and returns the records of all, in the order of ``tasks``.

    The engine is warm and idle; None where nothing is left to decode. Raises ValueError where a record is of another
    prompt than the task of its number.
    """
    traces = {(t.suite, t.index): t for t in map(Trace.parse, file.lines)}
    for task in tasks:
        known = traces.get(task.key)
        if known is not None and known.prompt not in ("", digest(task.ids)):
            raise ValueError(
                f"{file.path}: prompt {task.index} of {task.suite} is another one than was decoded; give another "
                "folder, or delete this file to decode anew"
            )
    left = [task for task in tasks if task.key not in traces]
    if engine is None or not left:
        return [traces[task.key] for task in tasks]
    running = {engine.submit(_request(task, job, decode, stop_ids)): task for task in left}
    begun, emitted, made, since = time.perf_counter(), 0, 0, time.perf_counter()
    while engine.has_work():
        for event in engine.step():
            emitted += len(event.tokens)
            if event.result is None:
                continue
            now, task, result = time.perf_counter(), running[event.id], event.result
            trace = Trace(
                suite=task.suite,
                index=task.index,
                tokens=tuple(result.tokens),
                committed=tuple(result.committed),
                offered=tuple(result.offered),
                finish=result.finish_reason,
                seconds=round(now - begun, 4),
                emitted=emitted,
                prompt=digest(task.ids),
            )
            file.append(dataclasses.asdict(trace))
            traces[task.key] = trace
            made, begun, emitted = made + emitted, now, 0
            progress.advance(1, f"{job.file.removesuffix('.jsonl')} {made / (now - since):.1f} tokens/s")
    return [traces[task.key] for task in tasks]


def _request(task: Task, job: Job, decode: DecodeConfig, stop_ids: Sequence[int]) -> Request:
    return Request(
        prompt_ids=task.ids,
        max_new_tokens=decode.max_new_tokens,
        sampling=job.run.sampling(),
        seed=task.seed,
        verification=job.run.verification,
        stop_token_ids=tuple(stop_ids) if decode.stop_at_eos else (),
    )
