"""``scripts/train.py`` for the tiny model of the training tests, which has no files of its own to be loaded from."""

from __future__ import annotations

import sys

from dspark_jax.command_line import folder_parser
from dspark_jax.config_toml import load_toml
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.loop import Run
from tests.train import tiny_run


def main() -> None:
    args = folder_parser(__doc__, out="the run's folder").parse_args()
    Run(load_toml(args.config, TrainConfig, args.set), tiny_run.target(), args.out).run()


if __name__ == "__main__":
    sys.exit(main())
