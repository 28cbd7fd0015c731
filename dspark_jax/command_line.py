"""What the commands that work on a folder by a TOML file have in common: flags, logging, exit status."""

from __future__ import annotations

import argparse
import errno
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


OF_A_PATH = {
    errno.ENOENT: "no such file or directory",
    errno.EEXIST: "exists, and is no directory",  # of a directory that is made where a file stands
    errno.EISDIR: "a directory, where a file is expected",
    errno.ENOTDIR: "not a directory, or below a file",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "a read-only file system",
    errno.ENAMETOOLONG: "too long a name",
    errno.ELOOP: "a link that leads back to itself",
}
"""What the operating system may say of a path that somebody has named wrongly, in words."""


def path_error(error: OSError) -> str | None:
    """The line on a path that is wrong, and names it; None for other errors of the operating system."""
    if error.filename is None:
        return str(error) if isinstance(error, FileNotFoundError) else None  # raised here, in words of its own
    why = OF_A_PATH.get(error.errno or 0)
    name = error.filename if error.filename2 is None else error.filename2  # of a file that is moved: where to
    return None if why is None else f"{name}: {why}"


def exit_status(act: Callable[[], None], *stops: type[Exception]) -> int:
    """Runs a command. Returns 0; 2 for input that is wrong (ValueError, a path that cannot be read or written), 3 for
    what ``stops`` it, each with one line on stderr that says what. Other errors are raised."""
    try:
        act()
    except stops as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if (line := path_error(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    return 0
