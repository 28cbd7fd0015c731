"""Trains a drafter: ``python scripts/train.py --config configs/train/smollm2_dspark.toml --out runs/first``.

Started again on the same folder, a run goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import jax

from dspark_jax import load_target
from dspark_jax.config_toml import load_toml
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.loop import Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    parser.add_argument("--export-only", type=Path, default=None, help="write the drafter of the last checkpoint here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    for noisy in ("absl", "orbax", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    config = load_toml(args.config, TrainConfig, args.set)
    run = Run(config, load_target(config.target), args.out)
    if args.export_only is not None:
        print(run.export(args.export_only))
        return
    run.run()
    print(f"{args.out}: done, drafter in {args.out / 'drafter'}")


if __name__ == "__main__":
    main()
