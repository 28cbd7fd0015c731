"""Files of one JSON object a line that survive being killed: a header says what the lines belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class LineFile:
    """Opens or continues a file.

    A last line that was cut off is dropped. Args: ``header``: what decides the lines; a file with another one is
    refused. ``newer``: entries of it that files of earlier versions do not have; there they are not known, and not
    compared.

    Attributes:
        lines: what was there.

    Raises:
        ValueError: the file belongs to something else (the differences are listed), or a line in its middle is
            broken (named by number).
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any], newer: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(header))
        found, size = _read(self.path) if self.path.is_file() else ([], 0)
        self.lines = found[1:]
        self._file = open(self.path, "ab")
        self._file.truncate(size)
        if not found:
            self.append(wanted)
        elif wrong := differences(found[0], known(wanted, found[0], newer)):
            self._file.close()
            raise ValueError(
                f"{self.path} holds records of something else: {'; '.join(wrong)}. Give another folder, or delete the "
                "file to make them anew"
            )

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes one line; it is in the operating system's hands on return."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Writes it through to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file and the bytes they take."""
    lines, size = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error})") from None
        size += len(line)
    return lines, size


def known(new: Mapping[str, Any], old: Mapping[str, Any], newer: Sequence[str]) -> dict[str, Any]:
    """``new`` without those of the entries ``newer`` that ``old`` does not have."""
    return {key: value for key, value in new.items() if key in old or key not in newer}


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """``key: old -> new`` for everything that differs in nested mappings."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{name}.{k}" if name else str(k))]
    return [] if old == new else [f"{name}: {old!r} -> {new!r}"]
