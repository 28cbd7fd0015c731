"""Reading and writing safetensors files with numpy alone (bfloat16 included), sharded or not.

The format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then
the data. Files are mapped, so a tensor is read from disk when its values are first touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class _File:
    """One mapped file: its tensors' dtype, shape and place, checked against the file's size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < 8:
            raise ValueError(f"{path}: not a safetensors file, or truncated ({size} bytes)")
        self.data = np.memmap(path, mode="r", dtype=np.uint8)
        length = int.from_bytes(self.data[:8].tobytes(), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: not a safetensors file, or truncated: it announces a header of {length} bytes, "
                f"the file has {size} bytes"
            )
        try:
            header = json.loads(self.data[8 : 8 + length].tobytes().decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not a safetensors file: its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise ValueError(f"{path}: not a safetensors file: its header is no JSON object")
        self.start = 8 + length
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries = {name: self._entry(name, value, size) for name, value in header.items()}

    def _entry(self, name: str, value: Any, size: int) -> tuple[np.dtype, tuple[int, ...], int, int]:
        """dtype, shape, first byte, last byte + 1 of a tensor."""
        try:
            code, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
            begin, end = (self.start + int(n) for n in value["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{self.path}: corrupt header entry of tensor {name}: {value!r}") from None
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise ValueError(f"{self.path}: tensor {name} has dtype {code}; known are {', '.join(_DTYPES)}")
        if end > size:
            raise ValueError(f"{self.path}: truncated: tensor {name} ends at byte {end}, the file has {size} bytes")
        count = 1
        for n in shape:
            count *= n
        if begin < self.start or min(shape, default=0) < 0 or end - begin != count * dtype.itemsize:
            raise ValueError(
                f"{self.path}: corrupt header: tensor {name} of shape {shape} and dtype {code} occupies "
                f"{end - begin} bytes, expected {count * dtype.itemsize}"
            )
        return dtype, shape, begin, end

    def read(self, name: str) -> np.ndarray:
        dtype, shape, begin, end = self.entries[name]
        return np.frombuffer(self.data, np.uint8, end - begin, begin).view(dtype).reshape(shape)


class SafetensorsSource:
    """Tensors of a safetensors file, or of a directory with ``model.safetensors`` or a sharded index.

    ``read`` gives a read-only view of the mapped file in the dtype it is stored in.

    Raises:
        FileNotFoundError: the path does not exist, the directory has no weights, or shards that the index
            lists are missing (all are named).
        ValueError: a corrupt or truncated file, or index entries that their shard does not hold.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, _File] = {}
        if self.path.is_file():
            self._add(_File(self.path))
        elif not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: no such file or directory")
        elif (self.path / INDEX_FILE).is_file():
            self._read_index(self.path / INDEX_FILE)
        elif (self.path / SINGLE_FILE).is_file():
            self._add(_File(self.path / SINGLE_FILE))
        else:
            found = sorted(p.name for p in self.path.iterdir())
            raise FileNotFoundError(
                f"{self.path}: neither {SINGLE_FILE} nor {INDEX_FILE} there; found: {', '.join(found) or 'nothing'}"
            )

    def _add(self, file: _File) -> None:
        self._files.update(dict.fromkeys(file.entries, file))

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: no valid index with a weight_map ({error!r})") from None
        missing = [name for name in shards if not (self.path / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{index}: shard files are missing: {', '.join(missing)}")
        files = {name: _File(self.path / name) for name in shards}
        absent = [f"{name} ({file})" for name, file in weight_map.items() if name not in files[file].entries]
        if absent:
            raise ValueError(f"{index}: tensors that their shard does not hold: {', '.join(absent)}")
        # A tensor that a shard holds and the index does not list is kept: restoring reports it as extra.
        for file in files.values():
            self._add(file)
        self._files.update({name: files[shard] for name, shard in weight_map.items()})

    @property
    def metadata(self) -> dict[str, str]:
        """The free-text metadata of the files, merged."""
        merged: dict[str, str] = {}
        for file in self._files.values():
            merged.update(file.metadata)
        return merged

    def names(self) -> Collection[str]:
        return self._files.keys()

    def dtype(self, name: str) -> np.dtype:
        """dtype in which a tensor is stored."""
        return self._files[name].entries[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name][1]

    def read(self, name: str) -> np.ndarray:
        return self._files[name].read(name)


def save(path: str | Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file, complete or not at all (a temporary file beside it is renamed).

    Args:
        path: the file to write; its directory is created.
        tensors: name -> array (numpy or JAX); stored in their own dtype.
        metadata: free text, beside ``format: pt`` that transformers asks for.

    Raises:
        ValueError: a dtype that the format does not know.
    """
    path = Path(path)
    # Large items first keeps every tensor aligned to its item size, as the reference implementation does.
    arrays = {name: np.asarray(value) for name, value in tensors.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in order:
        array = arrays[name]
        code = _CODES.get(array.dtype)
        if code is None:
            raise ValueError(f"{path}: tensor {name} has dtype {array.dtype}, which safetensors cannot hold")
        place = [offset, offset + array.nbytes]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": place}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
