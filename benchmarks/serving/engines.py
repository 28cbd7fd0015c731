"""Engines of the load benchmark: one an arm, all on the same weights."""

from __future__ import annotations

import hashlib
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax import Engine, EngineConfig, load_drafter, load_target
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.drafters import Drafter
from dspark_jax.engine.buckets import Key
from dspark_jax.engine.profile import in_turn
from dspark_jax.schedule import StepTimeTable
from dspark_jax.schedule.step_time import isotonic
from dspark_jax.targets import Target
from dspark_jax.whole_file import replacing

from .arms import Arm

Steps = dict[tuple[str, int, int], float]
"""Milliseconds of an engine's programs by kind (plain, verify, draft), slots and tokens, at the one context."""

LEAST_PASSES = 2

WHOLE = 1 << 20
"""Cells beyond any window: one context only, the whole window, so that all arms read equally many cells."""

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny" / "model.toml"


def load_models(target: str, drafter: str) -> tuple[Any, Any]:
    """A target and its drafter; ``tiny``: the small random ones of configs/tiny, to try a command out."""
    if target == "tiny":
        return tiny_models()
    loaded = load_target(target)
    return loaded, load_drafter(drafter, loaded)


def tiny_models() -> tuple[Any, Any]:
    config = tomllib.loads(TINY.read_text(encoding="utf-8"))
    target = Target.random(decoder_config_from_hf(config["target"], source=str(TINY)), jax.random.key(0))
    return target, Drafter.random(
        drafter_config_from_hf(config["drafter"], source=str(TINY)),
        jax.random.key(1),
        embed=target.params["embed_tokens"],
        head=target.params["lm_head"],
    )


def content_hash(*trees: Any) -> str:
    """Of the values of all arrays, and where they stand: other weights are another model, of whatever shape."""
    digest = hashlib.sha256()
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            values = np.ascontiguousarray(leaf)
            digest.update(f"{jax.tree_util.keystr(path)} {values.dtype} {values.shape}\n".encode())
            digest.update(values.reshape(-1).view(np.uint8))
    return digest.hexdigest()[:16]


def build(
    arm: Arm,
    target: Any,
    drafter: Any,
    kept: Path,
    *,
    fresh: bool,
    concurrency: Sequence[int],
    max_model_len: int,
    max_programs: int,
    profile_seconds: float,
    temperature: float,
    say: Callable[[str], None],
) -> tuple[Engine, StepTimeTable | None]:
    """An engine whose programs are compiled, and the step times that it decides by, None where it does not.

    Its slot buckets are the numbers of users, so that a cell runs the programs made for it.

    Args:
        kept: file of the step times that the run decides by.
        temperature: that all requests are sampled at, and step times measured.
        fresh: measure them and write the file, whole; else they are read, so that a run that goes on decides as it did
            before.

    Raises:
        ValueError: the file is of another machine or model, or is missing.
    """
    variable = not arm.fixed
    timed = arm.mode == "lagged"
    if timed and not fresh and not kept.is_file():
        raise ValueError(
            f"{kept} is missing, by which the run has decided so far: bring it back or choose another --out"
        )
    config = EngineConfig(
        max_num_seqs=max(concurrency),
        max_model_len=max_model_len,
        mode=arm.mode,
        num_speculative_tokens=arm.drafts,
        confidence_threshold=arm.threshold,
        slot_buckets=tuple(sorted(set(concurrency))),
        context_buckets=(WHOLE,),
        # A fixed arm needs one size a slot bucket: there is nothing to choose.
        max_programs=max_programs if variable else 1,
        profile_seconds=profile_seconds,
        profile_dir="",
        profile_temperature=temperature,
        step_time=str(kept) if timed and not fresh else None,
        seed=0,
    )
    engine = Engine(target, None if arm.mode == "none" else drafter, config)
    for note in engine.notes:
        say(f"{arm.name}: {note}")

    def told(line: str) -> None:
        say(f"{arm.name}: {line}")

    if not timed:
        engine.warmup(told)
        return engine, None
    if not fresh:
        engine.warmup(told)
        return engine, StepTimeTable.load(kept)
    table = engine.measure_step_times(told)
    save_whole(table, kept)
    return engine, table


def save_whole(table: StepTimeTable, path: Path) -> None:
    """Replaces a file; a kill leaves the old table or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch:
        table.save(scratch)


def measure(
    engines: Mapping[str, Engine],
    users: Collection[int],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Steps]:
    """Step times of idle engines' own programs: medians over passes over every program of every engine, so that a drift
    of the machine reaches all alike, in the order in which engines measure their own. No engine decides by them.

    Args:
        users: slot buckets whose programs are measured.
        seconds: no pass is begun after them, but that there are ``LEAST_PASSES``.
    """
    order = {
        name: in_turn(
            [
                key
                for key in engine.buckets.keys(engine.window - 1)
                if key.kind in ("plain", "verify", "draft") and key.slots in users
            ]
        )
        for name, engine in engines.items()
    }
    found: dict[str, dict[Key, list[float]]] = {name: {key: [] for key, _ in own} for name, own in order.items()}
    begin, passes = clock(), 0
    while passes < LEAST_PASSES or clock() - begin < seconds:
        for name, engine in engines.items():
            for key, counts in order[name]:
                engine._state, took = engine._programs.rehearse(key, engine._state)
                if counts:
                    found[name][key].append(took)
        passes += 1
    for engine in engines.values():
        engine._state = engine._programs.rest(engine._state)
    return {
        name: {(key.kind, key.slots, key.tokens): 1e3 * float(np.median(times)) for key, times in own.items()}
        for name, own in found.items()
    }


def over_rounds(rounds: Sequence[Steps]) -> Steps:
    """Medians of what rounds have measured."""
    return {place: float(np.median([steps[place] for steps in rounds if place in steps])) for place in rounds[0]}


def table_of(steps: Steps, context: int) -> StepTimeTable:
    """Step times as the simulator takes them: a row for each slot bucket, monotone in tokens. Where both a plain step
    and one that verifies have so many tokens, the plain one runs."""
    rows = []
    for slots in sorted({slots for kind, slots, _ in steps if kind != "draft"}):
        here = {(kind, tokens): ms for (kind, s, tokens), ms in steps.items() if s == slots}
        own = sorted((tokens, kind == "plain", ms) for (kind, tokens), ms in here.items() if kind != "draft")
        narrow = sorted((width, ms) for (kind, width), ms in here.items() if kind == "draft" and width)
        by_tokens = {tokens: ms for tokens, _, ms in own}
        times = isotonic(np.array(list(by_tokens.values())))
        drafts = {"draft_ms": here.get(("draft", 0)), "draft_ms_by_width": tuple(narrow)}
        rows.append(StepTimeTable(list(by_tokens), times, context, slots, **drafts))
    return StepTimeTable.combine(rows)
