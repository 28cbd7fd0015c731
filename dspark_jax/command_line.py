"""What the commands that work on a folder by a TOML file have in common: flags, logging, exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax


def folder_parser(
    description: str | None, *, out: str | None = None, config: str | None = None, needs_config: bool = True
) -> argparse.ArgumentParser:
    """Flags ``--config``, ``--out`` and ``--set``; ``out`` and ``config`` are the help of the first two."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=needs_config, help=config)
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    return parser


def begin_logging(quiet: Sequence[str] = ("jax",)) -> None:
    """Lines with the time on stderr; of the loggers ``quiet`` warnings only."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)


def keep_programs_in(folder: Path) -> None:
    """Compiled programs are kept below ``folder``."""
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "compiled"))


def exit_status(act: Callable[[], None], *stops: type[Exception]) -> int:
    """Runs a command. Returns 0; 2 for input that is wrong (ValueError, FileNotFoundError), 3 for what ``stops`` it,
    each with one line on stderr that says what."""
    try:
        act()
    except stops as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
