"""Makes training data: ``OUT/train`` and ``OUT/heldout`` (no shared conversation) of token records.

    python scripts/prepare_data.py --out runs/data                                    ShareGPT's own answers
    python scripts/prepare_data.py --config configs/data/smollm2.toml --out runs/own  answers of the target itself

Repeated questions and those of evaluation sets (``keep_away``) are left out. Regenerated answers are written as they
come; started again on the same folder, it goes on. Conversations are answered turn by turn with ``--set turns=3``.

Prompts for calibration, as JSONL of ``prompt_ids`` (``OUT`` is the file): the first user turns of a training run's
held-out records and, where those are too few, of its training records behind those that its drafter says it has read
("training" in its config.json; ``--set data.first=RECORDS`` says it otherwise):

    python scripts/prepare_data.py --prompts-of configs/train/smollm2_dspark.toml --drafter runs/first/drafter \\
        --out prompts/chat.jsonl

Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dspark_jax import load_target
from dspark_jax.command_line import begin_logging, exit_status, folder_parser, keep_programs_in
from dspark_jax.config_toml import load_toml
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.prepare import PrepareConfig, prepare
from dspark_jax.train.read_text import records_read
from dspark_jax.train.unread import unread_prompts
from dspark_jax.whole_file import DiskFull, full_disk_stops, write_whole


def main(argv: list[str] | None = None) -> int:
    parser = folder_parser(__doc__, config="TOML; without it the defaults", needs_config=False)
    parser.add_argument(
        "--prompts-of", type=Path, metavar="TRAIN.toml", help="write prompts that this run has not read"
    )
    parser.add_argument(
        "--drafter", metavar="NAME", help="with --prompts-of: the run's drafter, which says what it read"
    )
    parser.add_argument("--prompts", type=int, default=300, help="with --prompts-of: how many")
    parser.add_argument("--longest", type=int, default=224, help="with --prompts-of: tokens of a prompt at most")
    args = parser.parse_args(argv)
    if args.prompts_of and args.config:
        parser.error("--prompts-of takes the place of --config")
    told = any(_key(change) == "data.first" for change in args.set)
    if args.drafter and (told or not args.prompts_of):
        parser.error("--drafter goes with --prompts-of, and takes the place of --set data.first=RECORDS")
    if min(args.prompts, args.longest) < 1:
        parser.error("--prompts and --longest must be at least 1")
    begin_logging()

    def prompts() -> None:
        config = load_toml(args.prompts_of, TrainConfig, args.set).data
        # What the file says of data.first is where the run began.
        read = config.first if told else None
        if args.drafter and (read := records_read(config, args.drafter)) is None:
            raise ValueError(
                f"{config.train} (data.length = {config.length}, data.least_learnt = {config.least_learnt}) is not the "
                f"text that {args.drafter} has read, or was cut otherwise; give the configuration of its own run, with "
                "what its config.json says under training"
            )
        found = unread_prompts(config, args.prompts, args.longest, read=read)
        with full_disk_stops(args.out):
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(args.out, "".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in found))
        print(f"{args.out}: {len(found)} prompts")

    def data() -> None:
        keep_programs_in(args.out)
        config = load_toml(args.config, PrepareConfig, args.set)
        counts = prepare(config, load_target(config.target), args.out)
        print(", ".join(f"{args.out / name}: {count} records" for name, count in counts.items()))

    return exit_status(prompts if args.prompts_of else data, DiskFull)


def _key(change: str) -> str:
    """The setting that an override is about."""
    return ".".join(part.strip() for part in change.partition("=")[0].split("."))


if __name__ == "__main__":
    sys.exit(main())
