"""Temperatures of the confidence head, one table a rule and sampling temperature, and the file they live in.

G positions a block. The paper's calibration has temperatures alone. A temperature cannot move a probability across one
half; where a head is too sure (or too modest) everywhere, a table may add one number, its shift, to all logits first:
an extension, kept apart in the file, so that engines that read temperatures only find those that go without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.types import GREEDY_TEMPERATURE
from dspark_jax.whole_file import write_whole

_RULES = ("rejection", "coupled")
PLAIN, SHIFTED = "tables", "shifted_tables"
"""Lists of the file."""
LARGEST_SHIFT = 100.0
"""Beyond it a sigmoid is 0 or 1 whatever the head says: no calibration."""


@struct.dataclass(eq=False)
class Calibration:
    """Temperatures of the confidence logits, one a position: a pytree, so a jitted step can take it.

    Attributes:
        temperature: [G] > 0; probability = sigmoid((logit + shift) / temperature).
        ece_before, ece_after: [G] ECE of the survival scores on the records of the fit, without and with the
            temperatures; None where not known.
        verification: rule under which the records were made, "rejection" or "coupled" (static).
        sampling_temperature: sampling temperature of the records (static).
        shift: [] added to every logit; None: the paper's calibration, without one.
    """

    temperature: jax.Array | np.ndarray
    ece_before: jax.Array | np.ndarray | None = None
    ece_after: jax.Array | np.ndarray | None = None
    verification: str = struct.field(pytree_node=False, default="rejection")
    sampling_temperature: float = struct.field(pytree_node=False, default=1.0)
    shift: jax.Array | np.ndarray | float | None = None

    @property
    def shifted(self) -> bool:
        """It has a shift (perhaps 0)."""
        return self.shift is not None

    def apply(self, confidence_logits: jax.Array) -> jax.Array:
        """Conditional acceptance probabilities, sigmoid((logit + shift) / temperature), in the
        dtype of the logits.

        Args:
            confidence_logits: [..., K], K <= G: the first K positions of a block (temperatures are fitted
                from the left, so the first K do not depend on the rest).

        Returns:
            [..., K].

        Raises:
            ValueError: more positions than temperatures.
        """
        logits = jnp.asarray(confidence_logits)
        width, known = logits.shape[-1], self.temperature.shape[-1]
        if width > known:
            raise ValueError(f"confidence_logits: {width} positions, but the calibration has {known} temperatures")
        temperature = jnp.asarray(self.temperature[:width]).astype(logits.dtype)
        if self.shift is not None:
            logits = logits + jnp.asarray(self.shift).astype(logits.dtype)
        return jax.nn.sigmoid(logits / temperature.reshape((1,) * (logits.ndim - 1) + (width,)))

    def save(self, path: str | Path) -> None:
        """Write a calibration.json with this one table. `save_tables` writes several."""
        save_tables(path, [self])

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        verification: str | None = None,
        sampling_temperature: float | None = None,
        positions: int | None = None,
    ) -> Calibration:
        """One table of a calibration.json.

        Without `verification` and `sampling_temperature` it is the only table of the file, or the
        `rejection`, T = 1 one among several; with them, the table of that rule and temperature. Of two, one of them
        shifted, it is the shifted one.

        Args:
            positions: the number of temperatures there must be (the drafter's block); None = any.

        Raises:
            ValueError: malformed file, wrong number of temperatures, or no such table; the message names the
                file.
            OSError: the file cannot be read.
        """
        tables = load_tables(path, positions=positions)
        by_key = tables.by_key()
        if verification is None and sampling_temperature is None and len(by_key) == 1:
            return next(iter(by_key.values()))
        key = (
            verification or "rejection",
            1.0 if sampling_temperature is None else float(sampling_temperature),
        )
        if key in by_key:
            return by_key[key]
        raise ValueError(f"{path}: no table for {key}, only {list(by_key)}")


@struct.dataclass(eq=False)
class CalibrationTables:
    """All tables of a drafter, one for each rule and sampling temperature they were fitted at, and perhaps a shifted
    one beside it; a pytree."""

    tables: tuple[Calibration, ...]

    def __iter__(self) -> Iterator[Calibration]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def by_key(self) -> dict[tuple[str, float], Calibration]:
        """By rule and sampling temperature; a shifted table goes before one that is not."""
        return {_key(table): table for table in sorted(self.tables, key=lambda table: table.shifted)}

    def pick(self, verification: str, temperature: float) -> Calibration | None:
        """The table for a request: T = 0 below 1e-5 (both rules are one there), else T = 1 of its own rule.

        Args:
            verification: rule of the request.
            temperature: sampling temperature of the request.

        Returns:
            None where there is no such table: the raw confidences are used then.

        Raises:
            ValueError: an unknown rule, or a temperature that is negative or not finite.
        """
        check_key(verification, temperature)
        by_key = self.by_key()
        if temperature >= GREEDY_TEMPERATURE:
            return by_key.get((verification, 1.0))
        other = _RULES[1 - _RULES.index(verification)]
        return by_key.get((verification, 0.0), by_key.get((other, 0.0)))


def save_tables(path: str | Path, tables: Iterable[Calibration]) -> None:
    """Write calibration.json: all tables, and the `rejection`, T = 1 one also as "temperatures".

    The file is replaced as a whole: where it cannot be written, one that is there stays as it is.

    Raises:
        ValueError: no tables, two for one rule and temperature that are both shifted or both not, different lengths, or
            values that `load_tables` would refuse.
        OSError: the file cannot be written.
    """
    lists: dict[str, list[dict[str, Any]]] = {PLAIN: [], SHIFTED: []}
    for table in tables:
        record: dict[str, Any] = {
            "verification": table.verification,
            "sampling_temperature": float(table.sampling_temperature),
            "temperatures": np.asarray(table.temperature, np.float64).tolist(),
        }
        if table.shift is not None:
            record["shift"] = float(table.shift)
        for name in ("ece_before", "ece_after"):
            if (value := getattr(table, name)) is not None:
                record[name] = np.asarray(value, np.float64).tolist()
        lists[SHIFTED if table.shifted else PLAIN].append(record)
    content: dict[str, Any] = {name: records for name, records in lists.items() if records or name == PLAIN}
    for record in lists[PLAIN]:
        if (record["verification"], record["sampling_temperature"]) == ("rejection", 1.0):
            content = {"temperatures": record["temperatures"], **content}
    try:
        _parse(content, None)
    except ValueError as error:
        raise ValueError(f"{path} not written: {error}") from error
    write_whole(Path(path), json.dumps(content, indent=1) + "\n")


def load_tables(path: str | Path, *, positions: int | None = None) -> CalibrationTables:
    """All tables of a calibration.json.

    "temperatures" (or "sts_temperatures") at the top is the `rejection`, T = 1 table; "tables" lists them
    all, each with "verification", "sampling_temperature", "temperatures" and, if known, "ece_before" and
    "ece_after". "shifted_tables" lists those with a "shift". Any one is enough; other keys are ignored.

    Args:
        positions: the number of temperatures there must be; None = any.

    Raises:
        ValueError: not such a file: wrong length, a value that is zero, negative, not finite or no number, a shift that
            is none or beyond ``LARGEST_SHIFT``, two tables for one rule and temperature that differ. The message names
            the file and the entry.
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return _parse(json.loads(text), positions)
    except ValueError as error:  # json.JSONDecodeError is one too
        raise ValueError(f"{path}: {error}") from error


def _parse(content: Any, positions: int | None) -> CalibrationTables:
    if not isinstance(content, Mapping):
        raise ValueError(f"a JSON object expected, got {content!r:.80}")
    plain, shifted = (_listed(content, name, positions) for name in (PLAIN, SHIFTED))
    for name in ("temperatures", "sts_temperatures"):
        if name not in content:
            continue
        temperature = _positive(content[name], name, positions)
        same = plain.setdefault(("rejection", 1.0), Calibration(temperature=temperature))
        if not np.array_equal(same.temperature, temperature):
            raise ValueError(f"{name}: differs from the other table for ('rejection', 1.0) in this file")
    tables = (*plain.values(), *shifted.values())
    if not tables:
        raise ValueError(f"neither temperatures nor sts_temperatures nor {PLAIN} nor {SHIFTED} found")
    lengths = [(*_key(t), *([SHIFTED] if t.shifted else []), t.temperature.shape[-1]) for t in tables]
    if len({length for *_, length in lengths}) > 1:
        raise ValueError(f"tables of different lengths: {lengths}")
    return CalibrationTables(tables)


def _listed(content: Mapping[str, Any], name: str, positions: int | None) -> dict[tuple[str, float], Calibration]:
    """The tables of one list of the file, by rule and temperature."""
    listed = content.get(name, [])
    if not isinstance(listed, list):
        raise ValueError(f"{name}: a list expected, got {listed!r:.80}")
    tables: dict[tuple[str, float], Calibration] = {}
    for i, record in enumerate(listed):
        table = _table(record, f"{name}[{i}]", positions, shifted=name == SHIFTED)
        if _key(table) in tables:
            raise ValueError(f"{name}[{i}]: a second table for {_key(table)}")
        tables[_key(table)] = table
    return tables


def _table(record: Any, name: str, positions: int | None, *, shifted: bool) -> Calibration:
    if not isinstance(record, Mapping):
        raise ValueError(f"{name}: an object expected, got {record!r:.80}")
    for field in ("verification", "sampling_temperature", "temperatures", *(("shift",) if shifted else ())):
        if field not in record:
            raise ValueError(f"{name}.{field}: missing")
    check_key(record["verification"], record["sampling_temperature"], f"{name}.")
    temperature = _positive(record["temperatures"], f"{name}.temperatures", positions)
    if not shifted and "shift" in record:
        raise ValueError(f"{name}.shift: a table with a shift belongs into {SHIFTED}, where other engines do not look")
    shift: Any = record["shift"] if shifted else None
    if shifted and not (_is_number(shift) and abs(shift) <= LARGEST_SHIFT):
        raise ValueError(f"{name}.shift: a number within {LARGEST_SHIFT:g} of 0 expected, got {shift!r:.80}")
    errors: dict[str, np.ndarray] = {}
    for field in ("ece_before", "ece_after"):
        if record.get(field) is not None:
            errors[field] = _list(record[field], f"{name}.{field}", temperature.size)
            if not ((errors[field] >= 0.0) & (errors[field] <= 1.0)).all():
                raise ValueError(f"{name}.{field}: entries in [0, 1] expected, got {record[field]!r:.80}")
    return Calibration(
        temperature=temperature,
        verification=record["verification"],
        sampling_temperature=float(record["sampling_temperature"]),
        shift=None if shift is None else float(shift),
        **errors,
    )


def _positive(value: Any, name: str, size: int | None) -> np.ndarray:
    temperature = _list(value, name, size)
    if not (np.isfinite(temperature) & (temperature > 0.0)).all():
        raise ValueError(f"{name}: finite entries > 0 expected, got {value!r:.80}")
    return temperature


def _list(value: Any, name: str, size: int | None) -> np.ndarray:
    if not isinstance(value, list) or not value or not all(_is_number(entry) for entry in value):
        raise ValueError(f"{name}: a flat list of numbers expected, got {value!r:.80}")
    if size is not None and len(value) != size:
        raise ValueError(f"{name}: {size} entries expected, got {len(value)}")
    try:
        return np.array([float(entry) for entry in value])
    except OverflowError as error:
        raise ValueError(f"{name}: entry too large for a float64") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _key(table: Calibration) -> tuple[str, float]:
    temperature = float(table.sampling_temperature)
    return table.verification, 0.0 if temperature < GREEDY_TEMPERATURE else temperature


def check_key(verification: Any, sampling_temperature: Any, prefix: str = "") -> None:
    if verification not in _RULES:
        raise ValueError(f"{prefix}verification: one of {list(_RULES)} expected, got {verification!r:.80}")
    if not _is_number(sampling_temperature) or not 0.0 <= sampling_temperature <= sys.float_info.max:
        raise ValueError(
            f"{prefix}sampling_temperature: a finite number >= 0 expected, got {sampling_temperature!r:.80}"
        )
