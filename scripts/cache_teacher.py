"""Caches what the target says about training text, so that a run, or many, need not ask it again.

    python scripts/cache_teacher.py --config configs/train/smollm2_dspark.toml --out runs/teacher --records 2000
    python scripts/train.py --config configs/train/smollm2_dspark.toml --out runs/first --set data.teacher_cache=runs/teacher

Last hidden state and tapped layers in float16, no logits: of SmolLM2 with five taps 7 kB a token. It pays where one
text serves several runs; a single run over fresh text asks the target online. Started again, it makes what is missing
or damaged. Exit status: 0 done, 2 refused, 3 no room on the disk (what is written is whole).
"""  # noqa: E501 - a command line

from __future__ import annotations

import sys

from dspark_jax import load_target
from dspark_jax.command_line import begin_logging, exit_status, folder_parser, keep_programs_in
from dspark_jax.config_toml import load_toml
from dspark_jax.train.cached_teacher import build
from dspark_jax.train.config import TrainConfig
from dspark_jax.whole_file import DiskFull, full_disk_stops


def main(argv: list[str] | None = None) -> int:
    parser = folder_parser(__doc__, config="of the training run", out="folder of the states")
    parser.add_argument(
        "--records",
        type=int,
        default=0,
        help="of so many usable records of the text, behind the data.first that are passed over; 0: all",
    )
    args = parser.parse_args(argv)
    begin_logging()
    keep_programs_in(args.out)

    def act() -> None:
        config = load_toml(args.config, TrainConfig, args.set)
        with full_disk_stops(args.out):
            count = build(config, load_target(config.target), args.out, args.records)
        print(f"{args.out}: teacher states of {count} records")

    return exit_status(act, DiskFull)


if __name__ == "__main__":
    sys.exit(main())
