"""Accepted lengths of drafters side by side.

    python scripts/evaluate.py --config configs/evaluate/smollm2.toml --out runs/eval

Decodes the prompts of every set with every drafter, and without one, under the same sampling and seeds, and writes
``results.json``, ``report.md`` and PNG figures. Started again on the same folder it decodes only what is missing, so
that a drafter or a set may be added later. ``--set decode.max_new_tokens=64`` overrides a setting; lists are given
whole: ``--set 'drafters=[{name="mine", path="runs/first/drafter"}]'``.
Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import sys

from dspark_jax.evaluate.command import command
from dspark_jax.evaluate.config import EvaluateConfig
from dspark_jax.evaluate.run import Evaluation


def main(argv: list[str] | None = None) -> int:
    return command(argv, __doc__, EvaluateConfig, lambda c, out: Evaluation(c, out).run(), "report.md")


if __name__ == "__main__":
    sys.exit(main())
