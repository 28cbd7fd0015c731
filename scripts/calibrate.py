"""Calibrates a drafter's confidences from real decoding.

    python scripts/calibrate.py --config configs/calibrate/smollm2.toml --out runs/calibration

Decodes prompts with whole blocks under each of the tables' rules and temperatures, fits sequential temperature
scaling, and writes ``calibration.json`` (beside the drafter's weights, too, unless ``install = false``), a report with
ECE, Brier score and AUC by position, and reliability diagrams. Started again on the same folder it decodes only the
batches that are missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import jax

from dspark_jax.config_toml import load_toml
from dspark_jax.evaluate.calibration import CalibrateConfig, CalibrationRun


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and report")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    try:
        CalibrationRun(load_toml(args.config, CalibrateConfig, args.set), args.out).run()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((args.out / "calibration_report.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
