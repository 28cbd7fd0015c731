"""The container format GGUF (versions 2 and 3): header, metadata, tensor directory. The file is mapped.

Layout, little-endian: magic ``GGUF``, version u32, tensors u64, metadata pairs u64; pairs of (string, type
u32, value); tensors as (string, dimensions u32, sizes u64 innermost first, type u32, offset u64); padding;
data.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.gguf_quants import QUANT_TYPES, QuantType

_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape outermost first, its type, and the place of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    num_bytes: int

    @property
    def kind(self) -> QuantType:
        return QUANT_TYPES[self.type_id]


class GGUFFile:
    """Metadata and tensor directory of one GGUF file.

    Attributes:
        path: the file.
        metadata: key -> int, float, bool, str, list of str, or numpy array.
        tensors: GGUF tensor name -> TensorInfo.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no GGUF file, another version, a truncated or corrupt one; the file is named.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        with open(self.path, "rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ValueError(f"{self.path}: not a GGUF file (it begins with {magic!r})")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 4
        try:
            self._read_header()
        except (struct.error, IndexError):
            raise self._truncated() from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: corrupt GGUF header: a string is not UTF-8 ({error})") from None

    def raw(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor, a read-only view of the file."""
        return np.frombuffer(self._data, np.uint8, info.num_bytes, info.start)

    def _truncated(self, what: str = "its header ends early") -> ValueError:
        return ValueError(f"{self.path}: truncated or corrupt GGUF file ({what}; it has {len(self._data)} bytes)")

    def _take(self, size: int) -> int:
        """Moves on by ``size`` bytes and returns where they start."""
        start = self._position
        if size > len(self._data) - start:
            raise self._truncated()
        self._position = start + size
        return start

    def _u32(self) -> int:
        return _U32.unpack_from(self._data, self._take(4))[0]

    def _u64(self) -> int:
        return _U64.unpack_from(self._data, self._take(8))[0]

    def _string(self) -> str:
        size = self._u64()
        start = self._take(size)
        return self._data[start : start + size].decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """Many strings in one loop without calls: vocabularies have 100,000s of them."""
        data, position, end, unpack = self._data, self._position, len(self._data), _U64.unpack_from
        pieces = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise self._truncated()
            pieces.append(data[start:position])
        self._position = position
        return [piece.decode("utf-8") for piece in pieces]

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            inner, count = self._u32(), self._u64()
            if inner == _STRING:
                return self._strings(count)
            if inner == _ARRAY:
                return [self._value(inner) for _ in range(count)]
            dtype = self._dtype(inner)
            return np.frombuffer(self._data, dtype, count, self._take(count * dtype.itemsize))
        dtype = self._dtype(type_id)
        return np.frombuffer(self._data, dtype, 1, self._take(dtype.itemsize))[0].item()

    def _dtype(self, type_id: int) -> np.dtype:
        if type_id not in _SCALARS:
            raise ValueError(f"{self.path}: corrupt GGUF header: unknown value type {type_id}")
        return np.dtype(_SCALARS[type_id])

    def _read_header(self) -> None:
        version = self._u32()
        if version not in (2, 3):
            big = int.from_bytes(version.to_bytes(4, "little"), "big")
            known = f"big-endian version {big}" if big in (1, 2, 3) else f"version {version}"
            raise ValueError(f"{self.path}: GGUF {known} is not supported; little-endian 2 and 3 are")
        num_tensors, num_pairs = self._u64(), self._u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            self.metadata[key] = self._value(self._u32())
        found = [self._directory_entry() for _ in range(num_tensors)]
        align = int(self.metadata.get("general.alignment", 32))
        if align < 1:
            raise ValueError(f"{self.path}: corrupt GGUF header: general.alignment is {align}")
        data_start = -(-self._position // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for info in found:
            placed = dataclasses.replace(info, start=info.start + data_start)
            end = placed.start + placed.num_bytes
            if end > len(self._data):
                raise self._truncated(f"tensor {info.name} ends at byte {end}")
            self.tensors[info.name] = placed

    def _directory_entry(self) -> TensorInfo:
        """One tensor, its start still relative to the data section."""
        name = self._string()
        sizes = [self._u64() for _ in range(self._u32())]
        type_id, offset = self._u32(), self._u64()
        kind = QUANT_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(f"{t.name} ({i})" for i, t in QUANT_TYPES.items())
            raise ValueError(f"{self.path}: tensor {name} has unknown GGUF type {type_id}; known: {known}")
        row = sizes[0] if sizes else 1
        if row % kind.block_weights:
            raise ValueError(
                f"{self.path}: corrupt GGUF header: tensor {name} has rows of {row} weights, "
                f"{kind.name} stores blocks of {kind.block_weights}"
            )
        num_bytes = math.prod(sizes) // kind.block_weights * kind.block_bytes
        return TensorInfo(name, tuple(reversed(sizes)), type_id, offset, num_bytes)
