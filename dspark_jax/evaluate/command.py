"""The command line that calibration and evaluation have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.command_line import begin_logging, exit_status, folder_parser, keep_programs_in
from dspark_jax.config_toml import load_toml
from dspark_jax.whole_file import DiskFull, full_disk_is_said


def command(
    argv: Sequence[str] | None, description: str | None, schema: type, run: Callable[[Any, Path], Any], report: str
) -> int:
    """Reads ``--config`` with its ``--set`` overrides, runs in the folder ``--out``, prints the report.

    Args:
        schema: the configuration's class. run: given the configuration and the folder. report: its file's name there.

    Returns:
        the exit status: 2 for input that is wrong, 3 where the disk is full, each with one line that says what.
    """
    args = folder_parser(description, out="folder of records and report").parse_args(argv)
    begin_logging()
    keep_programs_in(args.out)

    def act() -> None:
        words = f"{args.out}: no space left on the disk; records made so far are kept. Make room and start again"
        with full_disk_is_said(words):
            run(load_toml(args.config, schema, args.set), args.out)

    status = exit_status(act, DiskFull)
    if status == 0:
        print((args.out / report).read_text(encoding="utf-8"))
    return status
