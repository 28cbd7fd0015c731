"""Engines of the load benchmark: one an arm, all on the same weights."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax import Engine, EngineConfig, load_drafter, load_target
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.drafters import Drafter
from dspark_jax.engine.buckets import Key
from dspark_jax.schedule import StepTimeTable
from dspark_jax.targets import Target

from .arms import Arm

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


def build(
    arm: Arm,
    target: Any,
    drafter: Any,
    tables: Path,
    *,
    concurrency: Sequence[int],
    max_model_len: int,
    max_programs: int,
    profile_seconds: float,
    say: Callable[[str], None],
) -> tuple[Engine, StepTimeTable]:
    """An engine whose programs are compiled, and the step times of its own programs.

    Its slot buckets are the numbers of users, so that a cell runs the programs made for it.

    Args:
        tables: directory of measured step times, a file an arm: what is there is used as it is, so that a run that
            goes on decides as it did before.

    Raises:
        ValueError: a file there is of another machine or model.
    """
    variable = not arm.fixed
    kept = tables / f"{arm.name.replace(' ', '_')}.json"
    timed = arm.mode == "lagged"
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
        step_time=str(kept) if timed and kept.is_file() else None,
        seed=0,
    )
    engine = Engine(target, None if arm.mode == "none" else drafter, config)
    for note in engine.notes:
        say(f"{arm.name}: {note}")

    def told(line: str) -> None:
        say(f"{arm.name}: {line}")

    if timed and not kept.is_file():
        table = engine.measure_step_times(told)
    else:
        engine.warmup(told)
        table = StepTimeTable.load(kept) if kept.is_file() else measure(engine)
    tables.mkdir(parents=True, exist_ok=True)
    table.save(kept)
    return engine, table


def measure(engine: Engine, rounds: int = 5) -> StepTimeTable:
    """Step times of an idle engine that does not need any itself, for the simulator: medians over rounds, each of which
    runs every program once."""
    buckets, programs = engine.buckets, engine._programs
    keys = [key for key in buckets.keys(engine.window - 1) if key.kind in ("plain", "verify", "draft")]
    found: dict[Key, list[float]] = {key: [] for key in keys}
    for _ in range(rounds + 1):
        for key in keys:
            engine._state, seconds = programs.rehearse(key, engine._state)
            found[key].append(seconds)
    engine._state = programs.rest(engine._state)
    ms = {key: 1e3 * float(np.median(times[1:])) for key, times in found.items()}
    rows = []
    for slots in buckets.slots:
        for context in buckets.contexts_of(slots):
            own = sorted((k for k in keys if (k.slots, k.context) == (slots, context) and k.kind != "draft"), key=_size)
            draft = ms.get(Key("draft", slots, 0, buckets.draft_context(context)))
            times = [ms[key] for key in own]
            rows.append(StepTimeTable([k.tokens for k in own], times, context, slots, draft_ms=draft))
    return StepTimeTable.combine(rows)


def _size(key: Key) -> int:
    return key.tokens
