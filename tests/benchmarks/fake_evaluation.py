"""Stands in for ``scripts/evaluate.py``: made-up records of every drafter that it is given, no model.
``FAKE_EVALUATION`` in the environment is an exit status."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tomllib
from pathlib import Path
from typing import Any

PROMPTS, DRAFTS, CYCLES = 6, 3, 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    if os.environ.get("FAKE_EVALUATION"):
        sys.exit(int(os.environ["FAKE_EVALUATION"]))
    entries = next(tomllib.loads(x)["drafters"] for x in args.set if x.startswith("drafters="))
    rows: list[dict[str, Any]] = []
    for entry in entries:
        rng, drafts = random.Random(entry["name"]), entry["num_speculative_tokens"] or DRAFTS
        lines: list[dict[str, Any]] = [{"target": "t", "drafter": {"files": entry["path"]}, "run": "greedy"}]
        for index in range(PROMPTS):
            committed = [1 + sum(rng.random() < 0.7 for _ in range(drafts)) for _ in range(CYCLES)]
            line = {"suite": "a", "index": index, "tokens": [7] * (1 + sum(committed)), "committed": committed}
            line |= {"offered": [drafts] * CYCLES, "finish": "length", "seconds": 1.0, "emitted": 1}
            lines.append(line | {"prompt": f"hash{index}"})
        path = args.out / "records" / "greedy" / f"{entry['name']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows.append({"name": entry["name"], "histogram": [0] * (drafts + 1), "equal_texts": 6, "prompts": PROMPTS})
    (args.out / "results.json").write_text(json.dumps({"suites": {"a": PROMPTS}, "runs": {"greedy": rows}}))


if __name__ == "__main__":
    main()
