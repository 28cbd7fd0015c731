"""Measures the step times of an engine on this machine: the table by which the adaptive modes decide.

    python scripts/profile_steps.py --set model=smollm2-135m-instruct --set drafter=smollm2-135m-instruct-dspark
    python scripts/profile_steps.py --config FILE.toml --set out=table.json
    python scripts/profile_steps.py --set roofline=h100-sxm --set model=qwen3-8b --set out=table.json

Prints the table and how well an additive model tells the programs it was not fitted to. The table is kept where the
server looks for it, so that a start of the same model on the same machine need not measure; ``out`` writes it
elsewhere, for ``EngineConfig.step_time``.

With ``roofline`` nothing is measured: the table of that hardware is computed from its memory bandwidth and its
arithmetic (``dspark_jax/schedule/roofline.py`` has the formula), for a Qwen3 target and its DSpark drafter.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

from dspark_jax import Engine, EngineConfig, load_drafter, load_target
from dspark_jax.config_toml import load_toml
from dspark_jax.load import check_drafter
from dspark_jax.schedule import StepTimeTable, roofline


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """Settings; the engine's as in ``EngineConfig``.

    Attributes:
        model, drafter: as in ``load_target`` and ``load_drafter``.
        seconds: budget of the measurement; compilation is not part of it.
        out: a file for the table; empty: only where the server looks.
        roofline: hardware to compute the table for (``roofline.CHIPS``); empty: this machine is measured. ``model`` is
            then a name in ``roofline.QWEN3``, and ``efficiency`` the share of the roof that is reached.
    """

    model: str = "smollm2-135m-instruct"
    drafter: str = "smollm2-135m-instruct-dspark"
    dtype: str = "auto"
    mode: str = "lagged"
    max_num_seqs: int = 8
    max_model_len: int = 2048
    num_speculative_tokens: int | None = None
    profile_temperature: float = 1.0
    seconds: float = 60.0
    out: str = ""
    roofline: str = ""
    efficiency: float = 1.0


def computed(config: ProfileConfig) -> StepTimeTable:
    """The table of hardware that is not here. Raises ValueError for a name that is not known."""
    known = {"roofline": list(roofline.CHIPS), "model": list(roofline.QWEN3)}
    for name, choices in known.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{name}: one of {', '.join(choices)} expected, found {getattr(config, name)!r}")
    chip, model = roofline.CHIPS[config.roofline], roofline.QWEN3[config.model]
    return roofline.roofline_table(model, roofline.Draft(), chip, efficiency=config.efficiency, name=config.model)


def measured(config: ProfileConfig) -> StepTimeTable:
    """The table of this machine."""
    check_drafter(config.drafter)
    target = load_target(config.model, dtype=config.dtype)
    drafter = load_drafter(config.drafter, target, dtype=config.dtype)
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig) if hasattr(config, f.name)}
    engine = Engine(target, drafter, EngineConfig(**shared, profile_seconds=config.seconds))
    for note in engine.notes:
        print(note)
    return engine.measure_step_times(print)


def main(arguments: list[str] | None = None) -> int:
    """Measures, and says where the output went. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_toml(args.config, ProfileConfig, args.overrides)
        table = computed(config) if config.roofline else measured(config)
        if config.out:
            table.save(Path(config.out))
    except (ValueError, OSError) as error:
        print(f"profile_steps: {error}", file=sys.stderr)
        return 1
    for row in table.rows:
        steps = ", ".join(f"{t}: {ms:.1f}" for t, ms in zip(row.tokens, row.milliseconds, strict=True))
        print(f"{row.slots} slots, context {row.context_tokens}: draft {row.draft_ms:.1f} ms; ms by tokens {steps}")
    if config.out:
        print(f"written to {config.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
