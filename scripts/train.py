"""Trains a drafter: ``python scripts/train.py --config configs/train/smollm2_dspark.toml --out runs/first``.

Started again on the same folder, a run goes on from its last checkpoint; while it runs, a second one in its folder is
refused. ``--set devices=0`` splits a batch over all devices; with several processes, start the same command on each
with ``--coordinator HOST:PORT --processes N --process I`` and a folder that all of them see.

Exit status: 0 done; 2 refused (configuration, data, another run's folder); 3 stopped (no text left, no finite loss, no
room on the disk, a damaged file of cached teacher states), with the last checkpoint whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

from dspark_jax import load_target
from dspark_jax.command_line import begin_logging, exit_status, folder_parser, keep_programs_in
from dspark_jax.config_toml import load_toml
from dspark_jax.data.teacher_cache import DamagedShard
from dspark_jax.load import target_config
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.folder import has_checkpoint, hold
from dspark_jax.train.loop import NonFiniteLoss, OutOfText, Run, read_input
from dspark_jax.whole_file import DiskFull, full_disk_stops


def main(argv: list[str] | None = None) -> int:
    parser = folder_parser(__doc__, out="the run's folder")
    parser.add_argument("--export-only", type=Path, default=None, help="write the drafter of the last checkpoint here")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of several processes: where the first one listens")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="number of this process, from 0")
    args = parser.parse_args(argv)
    if args.processes != 1 and not args.coordinator:
        parser.error("--processes needs --coordinator HOST:PORT, where the first one listens")
    begin_logging(quiet=("absl", "orbax", "jax"))
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for runs on CPUs
        jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)
    keep_programs_in(args.out)
    made: list[Run] = []

    def make() -> None:
        config = load_toml(args.config, TrainConfig, args.set)
        if args.export_only is not None and not has_checkpoint(args.out):
            raise ValueError(f"--export-only: {args.out} holds no checkpoint")
        with full_disk_stops(args.out):
            read_input(config, args.out, target_config(config.target))  # before the target's weights are read
            if args.export_only is None and args.process == 0:
                hold(args.out)  # before the checkpoint is read that another process may be about to replace
            made.append(Run(config, load_target(config.target), args.out))

    if status := exit_status(make, DiskFull):
        return status
    (run,) = made
    if (place := args.export_only) is not None:

        def export() -> None:
            with full_disk_stops(place):
                print(run.export(place))

        return exit_status(export, DiskFull)
    try:
        run.run()
    except (DamagedShard, DiskFull, NonFiniteLoss, OutOfText) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    print(f"{args.out}: done, drafter in {args.out / 'drafter'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
