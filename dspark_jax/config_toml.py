"""TOML files and ``--set a.b=c`` overrides into dataclasses, for scripts. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def load_toml(path: str | Path | None, kind: type[T], overrides: Sequence[str] = ()) -> T:
    """Reads a TOML file into a (nested) dataclass.

    Args:
        path: the file; None stands for an empty one.
        kind: a dataclass; tables are its dataclass fields, arrays its tuples.
        overrides: ``a.b=value`` strings, applied in order; a value that is no TOML is taken as plain text.

    Raises:
        FileNotFoundError: no such file.
        ValueError: one message with all unknown keys (the known ones are listed), missing keys and values of
            the wrong type; or the first syntax error; or why the file cannot be read.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: no such file") from None
        except OSError as error:  # a directory, or not ours to read
            raise ValueError(f"{path}: cannot be read as a TOML file ({error.strerror})") from None
        except ValueError as error:  # TOML syntax, or not UTF-8
            raise ValueError(f"{path}: {error}") from None
    for text in overrides:
        apply_override(values, text)
    return from_mapping(kind, values, source=str(path) if path is not None else "command line")


def apply_override(values: dict[str, Any], text: str) -> None:
    """Sets one ``a.b=value`` in nested dicts, in place."""
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ValueError(f"--set {text!r}: expected key=value, e.g. optimizer.learning_rate=1e-3")
    table = values
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {text!r}: {part} is no table")
    try:
        table[parts[-1]] = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        table[parts[-1]] = value.strip()


def from_mapping(kind: type[T], values: Mapping[str, Any], *, source: str) -> T:
    """A dataclass from nested mappings, checked against its type hints. ``source`` is named in errors."""
    problems: list[str] = []
    result = _build(kind, values, "", problems)
    if problems:
        raise ValueError("\n  ".join([f"{source}: this configuration cannot be used", *problems]))
    return typing.cast(T, result)


def _build(kind: Any, values: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    table = f"[{where.rstrip('.')}]" if where else "the top level"
    for key in sorted(values.keys() - fields.keys()):
        problems.append(f"unknown key {where}{key}; {table} knows: {', '.join(fields)}")
    done: dict[str, Any] = {}
    before = len(problems)
    for name, field in fields.items():
        if name in values:
            done[name] = _convert(hints[name], values[name], f"{where}{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"missing key {where}{name}")
    if len(problems) > before:
        return None
    try:
        return kind(**done)
    except ValueError as error:  # a check of the dataclass itself
        problems.append(f"{where}{error}" if where else str(error))
        return None


def _convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, where, problems)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _build(hint, value, f"{where}.", problems)
    if origin is typing.Literal:
        if value in args:
            return value
        problems.append(f"{where} must be one of {', '.join(map(str, args))}, found {value!r}")
        return None
    if origin in (tuple, list) and isinstance(value, list):
        inner = args[0] if args else Any
        if origin is tuple and len(args) > 1 and args[1] is not Ellipsis:
            inner = None
            if len(args) != len(value):
                problems.append(f"{where} must have {len(args)} entries, found {len(value)}")
                return None
        hints = args if inner is None else [inner] * len(value)
        items = zip(hints, value, strict=True)
        return origin([_convert(h, v, f"{where}[{i}]", problems) for i, (h, v) in enumerate(items)])
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or hint
    if plain is Any or (isinstance(plain, type) and isinstance(value, plain) and _same_bool(plain, value)):
        return value
    problems.append(f"{where} must be {getattr(hint, '__name__', hint)}, found {value!r}")
    return None


def _same_bool(kind: type, value: Any) -> bool:
    """``True`` is an int in Python; in a configuration it is not."""
    return not isinstance(value, bool) or kind is bool


def _convert_union(args: Sequence[Any], value: Any, where: str, problems: list[str]) -> Any:
    tried: list[str] = []
    for option in args:
        if option is type(None):
            continue
        attempt: list[str] = []
        result = _convert(option, value, where, attempt)
        if not attempt:
            return result
        tried += attempt
    problems += tried[:1] if len(set(args) - {type(None)}) == 1 else [f"{where}: no type of {args} takes {value!r}"]
    return None
