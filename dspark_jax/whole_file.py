"""Files that are replaced as a whole, and what is said where a disk has no room for them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class DiskFull(RuntimeError):
    """There is no room to write; what was written before is whole."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a file in, which then replaces ``path``: a reader, or a kill, sees the old content or the new
    one. Where it cannot be written the old one stays, and nothing is left beside it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file by this content."""
    with replacing(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def write_array(path: Path, array: np.ndarray) -> None:
    """Replaces an ``.npy`` file. NumPy's own writing to a full disk does not say that it is full."""
    table = io.BytesIO()
    np.save(table, array)
    write_whole(path, table.getvalue())


def is_disk_full(error: BaseException | None) -> bool:
    """The error, or one that led to it, says that there is no room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left" in str(error) or "ENOSPC" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def full_disk_is_said(words: str) -> Iterator[None]:
    """Raises DiskFull with ``words`` where what is done within meets a full disk."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise DiskFull(words) from error


def full_disk_stops(place: str | Path) -> contextlib.AbstractContextManager[None]:
    """``full_disk_is_said`` for a command that writes into ``place`` and goes on when it is started again."""
    return full_disk_is_said(f"{place}: no space left on the disk; make room and start again")
