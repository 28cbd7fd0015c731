"""Stands in for ``scripts/train.py``: the same files, a known cost, no model. A line and a checkpoint every
``run.log_every`` steps.

``FAKE_TRAINER`` (JSON) says what is different: ``die_at`` a step, once; ``signal_at`` a step, at which the process that
started it gets SIGTERM; ``unsaved`` steps that a checkpoint lags behind; ``compile_s`` of CPU time at every start,
``step_s`` at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


def burn(seconds: float) -> None:
    """Computes for so many seconds of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    how: dict[str, Any] = {"compile_s": 0.0, "step_s": 0.005, **json.loads(os.environ.get("FAKE_TRAINER", "{}"))}
    config = tomllib.loads(args.config.read_text())
    values = {"data.batch": config["data"]["batch"], "run.log_every": config["run"]["log_every"]}
    values |= {key: int(text) for key, _, text in (x.partition("=") for x in args.set) if text.isdecimal()}
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "sets.jsonl", "a") as file:
        file.write(json.dumps(args.set) + "\n")
    (args.out / "pid").write_text(str(os.getpid()))
    facts = {"bigram_start_cpu_seconds": 0.2} if config["drafter"].get("bigram_start") else {}
    with open(args.out / "environment.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")
    saved = args.out / "saved"
    step = int(saved.read_text()) if saved.is_file() else 0
    path = args.out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
    burn(how["compile_s"])
    while step < values["optim.total_steps"]:
        burn(how["step_s"])
        step += 1
        if step % values["run.log_every"] == 0:
            line = {"step": step, "ce": 1.0, "positions": 100.0 * step, "records": values["data.batch"] * step}
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
            saved.write_text(str(max(step - how.get("unsaved", 0), 0)))
        died = args.out / "died"
        if step == how.get("die_at") and not died.is_file():
            died.touch()
            sys.exit(1)
        if step == how.get("signal_at"):
            os.kill(os.getppid(), signal.SIGTERM)
    (args.out / "drafter").mkdir(exist_ok=True)


if __name__ == "__main__":
    main()
