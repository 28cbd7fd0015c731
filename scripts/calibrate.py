"""Calibrates a drafter's confidences from real decoding.

    python scripts/calibrate.py --config configs/calibrate/smollm2.toml --out runs/calibration

Decodes prompts with whole blocks under each of the tables' rules and temperatures, fits sequential temperature
scaling (with ``shift = true`` once more behind a shift of all logits; the engine prefers that table), and writes
``calibration.json`` (beside the drafter's weights, too, unless ``install = false``), a report with ECE, Brier score and
AUC by position, and reliability diagrams. Started again on the same folder it decodes only the
batches that are missing. Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import sys

from dspark_jax.evaluate.calibration import CalibrateConfig, CalibrationRun
from dspark_jax.evaluate.command import command


def main(argv: list[str] | None = None) -> int:
    return command(argv, __doc__, CalibrateConfig, lambda c, out: CalibrationRun(c, out).run(), "calibration_report.md")


if __name__ == "__main__":
    sys.exit(main())
