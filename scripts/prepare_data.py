"""Makes training data: ``OUT/train`` and ``OUT/heldout`` (no shared conversation) of token records.

    python scripts/prepare_data.py --out runs/data                                    ShareGPT's own answers
    python scripts/prepare_data.py --config configs/data/smollm2.toml --out runs/own  answers of the target itself

Repeated questions and those of evaluation sets (``keep_away``) are left out. Regenerated answers are written as they
come; started again on the same folder, it goes on. Conversations are answered turn by turn with ``--set turns=3``.
Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import sys

from dspark_jax import load_target
from dspark_jax.command_line import begin_logging, exit_status, folder_parser, keep_programs_in
from dspark_jax.config_toml import load_toml
from dspark_jax.train.prepare import PrepareConfig, prepare
from dspark_jax.whole_file import DiskFull


def main(argv: list[str] | None = None) -> int:
    args = folder_parser(__doc__, config="TOML; without it the defaults", needs_config=False).parse_args(argv)
    begin_logging()
    keep_programs_in(args.out)

    def act() -> None:
        config = load_toml(args.config, PrepareConfig, args.set)
        counts = prepare(config, load_target(config.target), args.out)
        print(", ".join(f"{args.out / name}: {count} records" for name, count in counts.items()))

    return exit_status(act, DiskFull)


if __name__ == "__main__":
    sys.exit(main())
