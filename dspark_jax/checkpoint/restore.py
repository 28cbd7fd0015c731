"""Restoring a parameter tree from named tensors, with one error that lists everything that is wrong.

A model describes its parameters as a tree of ``ParamSpec`` whose ``name`` is the tensor's name in the
checkpoint. A source (safetensors, GGUF, a renamed view) answers names, shapes and, one at a time, values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.params import ParamSpec, is_spec, spec_leaves
from dspark_jax.types import PyTree

DERIVED_BUFFERS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")
"""Buffers that old checkpoints store and that follow from the config: always allowed as extra tensors."""


class TensorSource(Protocol):
    """Named tensors of a checkpoint. ``path`` is the file or directory that errors name."""

    path: Path

    def names(self) -> Collection[str]:
        """All tensor names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Values of one tensor, floats in any float dtype; the array may be a read-only view of the file."""
        ...


Put = Callable[[np.ndarray, ParamSpec], Any]
"""Places one host array on the devices (``sharding.putter(mesh)`` makes one)."""


class RenamedSource:
    """A source under other names. ``rename`` maps a stored name to the one wanted, or to None: left out.

    Two tensors that get one name are an error.
    """

    def __init__(self, source: TensorSource, rename: Callable[[str], str | None]) -> None:
        self.path = source.path
        self._source = source
        self._original: dict[str, str] = {}
        for name in source.names():
            new = rename(name)
            if new is None:
                continue
            if new in self._original:
                raise ValueError(f"{self.path}: tensors {self._original[new]} and {name} both mean {new}")
            self._original[new] = name

    def names(self) -> Collection[str]:
        return self._original.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._original[name])

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._original[name])


def _host(array: np.ndarray, spec: ParamSpec) -> Any:
    return jnp.asarray(array)


def check(specs: PyTree, source: TensorSource, *, allow_extra: Sequence[str] = ()) -> None:
    """Compares names and shapes of a source with a tree of ParamSpecs; reads no values.

    Args:
        specs: tree of ParamSpecs with names.
        source: the checkpoint.
        allow_extra: shell-style patterns of further tensors that may be there (``lm_head.weight`` of a tied
            model).

    Raises:
        ValueError: one message that lists all missing tensors, unexpected tensors and wrong shapes.
    """
    wanted = {spec.name: spec for spec in spec_leaves(specs)}
    if "" in wanted:
        raise ValueError(f"{source.path}: a parameter of shape {wanted[''].shape} has no tensor name")
    present = set(source.names())
    missing = [name for name, spec in wanted.items() if name not in present and not spec.optional]
    allowed = (*DERIVED_BUFFERS, *allow_extra)
    unknown = present - wanted.keys()
    extra = [name for name in unknown if not any(fnmatch.fnmatchcase(name, p) for p in allowed)]
    shapes = [
        f"{name} is {tuple(source.shape(name))}, expected {spec.shape}"
        for name, spec in wanted.items()
        if name in present and tuple(source.shape(name)) != spec.shape
    ]
    if missing or extra or shapes:
        lines = [f"{source.path}: the checkpoint does not fit the model"]
        lines += _section("missing tensors", missing)
        lines += _section("unexpected tensors", sorted(extra))
        lines += _section("wrong shapes", shapes)
        raise ValueError("\n".join(lines))


def _section(title: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    return [f"  {title} ({len(items)}):", *(f"    {item}" for item in items)] if items else []


def restore(
    specs: PyTree,
    source: TensorSource,
    dtype: Any,
    *,
    allow_extra: Sequence[str] = (),
    put: Put = _host,
) -> PyTree:
    """Reads a parameter tree, one tensor at a time.

    Args:
        specs: tree of ParamSpecs with names.
        source: the checkpoint.
        dtype: float dtype of the result; specs with ``integer`` become int32.
        allow_extra: as in ``check``.
        put: places one host array; the default is one local device.

    Returns:
        The tree with arrays for specs; None for optional tensors that the checkpoint lacks.

    Raises:
        ValueError: what ``check`` lists; a tensor with NaN or infinite values, or of the wrong kind (integer
            for float), each naming the tensor; float64 asked for without ``jax_enable_x64``.
    """
    dtype = np.dtype(dtype)
    require_dtype(dtype)
    check(specs, source, allow_extra=allow_extra)
    present = set(source.names())

    def load(spec: ParamSpec) -> Any:
        if spec.name not in present:
            return None
        array = source.read(spec.name)
        cast = _as_int32 if spec.integer else _as_float
        return put(cast(array, dtype, f"{source.path}: tensor {spec.name}"), spec)

    return jax.tree.map(load, specs, is_leaf=is_spec)


def restore_abstract(specs: PyTree, source: TensorSource, dtype: Any, *, allow_extra: Sequence[str] = ()) -> PyTree:
    """The tree that ``restore`` would give, as ``jax.ShapeDtypeStruct``, after ``check``; reads no values."""
    check(specs, source, allow_extra=allow_extra)
    present = set(source.names())

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct | None:
        if spec.name not in present:
            return None
        return jax.ShapeDtypeStruct(spec.shape, jnp.int32 if spec.integer else dtype)

    return jax.tree.map(shape, specs, is_leaf=is_spec)


def require_dtype(dtype: Any) -> None:
    """Raises ValueError where JAX would silently turn float64 into float32."""
    if np.dtype(dtype) == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ValueError("dtype float64 needs jax_enable_x64 (jax.config.update('jax_enable_x64', True))")


def _as_int32(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    if array.dtype.kind not in "iub":
        raise ValueError(f"{where} holds {array.dtype}, expected integers")
    if array.size and array.dtype.itemsize > 2:
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{where} holds integers from {low} to {high}, which do not fit 32 bits")
    return array.astype(np.int32)


def _as_float(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    if array.dtype.kind in "iubc":
        raise ValueError(f"{where} holds {array.dtype}, expected floats (a quantised checkpoint?)")
    # A read-only array is a view of the mapped file: weights must not change when the file does, so copy it.
    with np.errstate(over="ignore"):  # an overflow becomes an infinity, which is reported below
        array = array.astype(dtype, copy=not array.flags.writeable)
    if _maybe_not_finite(array):
        bad = ~np.isfinite(array.astype(np.float32) if array.dtype.itemsize < 4 else array)
        if bad.any():
            first = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"{where} has {int(bad.sum())} NaN or infinite values of {array.size} (the first at {first}: "
                f"{array[first]}, as {dtype})"
            )
    return array


_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}


def _maybe_not_finite(array: np.ndarray) -> bool:
    """A cheap test that may cry wolf (a sum that overflows) but never misses a NaN or an infinity."""
    exponent = _EXPONENT.get(array.dtype.name)
    if exponent is not None:  # numpy adds 16-bit floats slowly, but their bits compare as integers
        bits = array.reshape(-1).view(np.uint16)
        step = 1 << 20
        return any(bool(((bits[i : i + step] & 0x7FFF) >= exponent).any()) for i in range(0, bits.size, step))
    with np.errstate(over="ignore", invalid="ignore"):
        return not np.isfinite(array.sum())
