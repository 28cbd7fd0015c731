"""The command line that calibration and evaluation have in common."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from dspark_jax.config_toml import load_toml


def command(
    argv: Sequence[str] | None, description: str | None, schema: type, run: Callable[[Any, Path], Any], report: str
) -> int:
    """Reads ``--config`` with its ``--set`` overrides, runs in the folder ``--out``, prints the report.

    Args:
        schema: the configuration's class. run: given the configuration and the folder. report: its file's name there.

    Returns:
        the exit status: 2 for input that is wrong, with one line that says what.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and report")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    try:
        run(load_toml(args.config, schema, args.set), args.out)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((args.out / report).read_text(encoding="utf-8"))
    return 0
