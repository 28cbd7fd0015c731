"""Matrices stored as int8 with one float32 scale a row: our extension of DeepSpec's layout.

A matrix ``<name>`` becomes ``<name>.int8`` (int8, same shape) and ``<name>.scale`` (float32, one a row) with
``value = int8 * scale`` and ``scale = max |row| / 127``; the config says ``"quantization": {"format":
"dspark_jax_int8_rows"}``. Rounding moves a value by at most half a step, so the largest error in a row is at
most 1/254 of the row's largest absolute value. Vectors, and matrices of a single row (the confidence
projection), stay floats: they are small, and one outlier would cost all the rest its precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dspark_jax.checkpoint.restore import TensorSource

FORMAT = "dspark_jax_int8_rows"
VALUES, SCALE = ".int8", ".scale"


def quantize_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[out, in]`` floats to ``(int8 [out, in], float32 scales [out])``; a row of zeros has scale 0.

    Raises ValueError for anything but a matrix of finite numbers.
    """
    if matrix.ndim != 2:
        raise ValueError(f"only matrices have rows to scale, found shape {matrix.shape}")
    values = np.asarray(matrix, np.float32)
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinite values cannot be quantised")
    scale = np.max(np.abs(values), axis=1, initial=0.0) / np.float32(127)
    step = np.where(scale > 0, scale, np.float32(1))
    return np.rint(values / step[:, None]).clip(-127, 127).astype(np.int8), scale.astype(np.float32)


def dequantize_rows(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Inverse of ``quantize_rows`` up to its rounding: float32 ``[out, in]``."""
    return values.astype(np.float32) * scale[:, None]


def quantize_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors, float matrices of two rows or more replaced by ``.int8`` and ``.scale``."""
    out: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if value.ndim == 2 and value.shape[0] > 1 and value.dtype.kind not in "iub":
            out[name + VALUES], out[name + SCALE] = quantize_rows(value)
        else:
            out[name] = value
    return out


class Int8RowsSource:
    """A source that shows stored ``<name>.int8`` + ``<name>.scale`` as the float32 matrix ``<name>``.

    Args:
        source: the checkpoint.
        declared: the ``quantization`` entry of its config, None where there is none.

    Raises ValueError for an unknown format, for quantised tensors that the config does not declare (or the
    other way round), and for pairs that are incomplete or do not fit each other.
    """

    def __init__(self, source: TensorSource, declared: Any) -> None:
        self.path = source.path
        self._source = source
        plain = set(source.names())
        self._quantised = {name.removesuffix(VALUES) for name in plain if name.endswith(VALUES)}
        if declared is not None and (not isinstance(declared, Mapping) or declared.get("format") != FORMAT):
            raise ValueError(f"{self.path}: unknown quantization {declared!r}; known: {{'format': '{FORMAT}'}}")
        if bool(self._quantised) != (declared is not None):
            found = f"{len(self._quantised)} tensors end in {VALUES}"
            raise ValueError(f"{self.path}: the config declares quantization = {declared!r}, but {found}")
        self._names = {name for name in plain if not name.endswith((VALUES, SCALE))} | self._quantised
        scales = {name.removesuffix(SCALE) for name in plain if name.endswith(SCALE)}
        problems = sorted(scales ^ self._quantised)
        problems += sorted(self._quantised & plain)
        for name in sorted(self._quantised & scales):
            shape, rows = source.shape(name + VALUES), source.shape(name + SCALE)
            if len(shape) != 2 or rows != shape[:1]:
                problems.append(f"{name} ({VALUES} is {shape}, {SCALE} is {rows})")
        if problems:
            raise ValueError(f"{self.path}: broken int8 tensors: {', '.join(problems)}")

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name + VALUES if name in self._quantised else name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._quantised:
            return self._source.read(name)
        values, scale = self._source.read(name + VALUES), self._source.read(name + SCALE)
        if values.dtype != np.int8:
            raise ValueError(f"{self.path}: tensor {name}{VALUES} holds {values.dtype}, expected int8")
        return dequantize_rows(values, scale)
