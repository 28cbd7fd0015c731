"""Sequential temperature scaling (STS) of the confidence head, and the file its tables live in.

Source: Cheng et al., arXiv:2607.05147, the paper's sections on confidence calibration: position by position
from the left, one temperature each, chosen so that the *survival* score (cumulative product of
sigmoid(logit_i / T_i), i <= k) has the lowest calibration error. Grid and ties as in oracle/README section 5.
N blocks, G positions; the fit is float64 NumPy, because one sample that crosses a bin edge moves ECE by about
1 / N and may change the choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.calibrate.metrics import ece_of_column, sigmoid
from dspark_jax.types import GREEDY_TEMPERATURE
from dspark_jax.whole_file import write_whole

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Python's power and not NumPy's, whose last bit depends on the processor's vector instructions.
GRID = np.array([4.0 ** ((j - 40) / 40) for j in range(81)])
"""[81] candidate temperatures, 1/4 to 4, ascending; GRID[40] is exactly 1."""

TIE = 1e-12
"""ECE values this close to the lowest are tied; the temperature nearest to 1 wins, then the smaller one."""

# Grid indices by |ln T|, then by T.
_PREFERENCE = np.array(sorted(range(81), key=lambda j: (abs(j - 40), j)))
_RULES = ("rejection", "coupled")


@struct.dataclass(eq=False)
class Calibration:
    """Temperatures of the confidence logits, one a position: a pytree, so a jitted step can take it.

    Attributes:
        temperature: [G] > 0; probability = sigmoid(logit / temperature).
        ece_before, ece_after: [G] ECE of the survival scores on the records of the fit, without and with the
            temperatures; None where not known.
        verification: rule under which the records were made, "rejection" or "coupled" (static).
        sampling_temperature: sampling temperature of the records (static).
    """

    temperature: jax.Array | np.ndarray
    ece_before: jax.Array | np.ndarray | None = None
    ece_after: jax.Array | np.ndarray | None = None
    verification: str = struct.field(pytree_node=False, default="rejection")
    sampling_temperature: float = struct.field(pytree_node=False, default=1.0)

    def apply(self, confidence_logits: jax.Array) -> jax.Array:
        """Conditional acceptance probabilities, sigmoid(logit / temperature), in the dtype of the logits.

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
        `rejection`, T = 1 one among several; with them, the table of that rule and temperature.

        Args:
            positions: the number of temperatures there must be (the drafter's block); None = any.

        Raises:
            ValueError: malformed file, wrong number of temperatures, or no such table; the message names the
                file.
            OSError: the file cannot be read.
        """
        tables = load_tables(path, positions=positions)
        if verification is None and sampling_temperature is None and len(tables) == 1:
            return tables.tables[0]
        key = (
            verification or "rejection",
            1.0 if sampling_temperature is None else float(sampling_temperature),
        )
        for table in tables:
            if _key(table) == key:
                return table
        raise ValueError(f"{path}: no table for {key}, only {[_key(table) for table in tables]}")


@struct.dataclass(eq=False)
class CalibrationTables:
    """All tables of a drafter, one for each rule and sampling temperature they were fitted at; a pytree."""

    tables: tuple[Calibration, ...]

    def __iter__(self) -> Iterator[Calibration]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

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
        _check_key(verification, temperature)
        by_key = {_key(table): table for table in self.tables}
        if temperature >= GREEDY_TEMPERATURE:
            return by_key.get((verification, 1.0))
        other = _RULES[1 - _RULES.index(verification)]
        return by_key.get((verification, 0.0), by_key.get((other, 0.0)))


def fit(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    bins: int = 20,
    *,
    verification: str = "rejection",
    sampling_temperature: float = 1.0,
) -> Calibration:
    """Sequential temperature scaling.

    Args:
        confidence_logits: [N, G] of blocks that were verified in full.
        accepted: [N, G], 1 if drafts 1..k of the block were all accepted, else 0; rows non-increasing.
        bins: equal-width bins of the calibration error.
        verification: rule under which the records were made; kept with the result.
        sampling_temperature: of the records; kept with the result.

    Returns:
        Calibration with temperature, ece_before and ece_after [G] float64.

    Raises:
        ValueError: shapes differ or hold nothing, logits not finite, labels other than 0 and 1 or rising
            along a row, bins < 1, an unknown rule, a sampling temperature that is negative or not finite.
    """
    logits, labels = _records(confidence_logits, accepted)
    if bins < 1:
        raise ValueError(f"bins: at least 1 expected, got {bins}")
    _check_key(verification, sampling_temperature)
    positions = logits.shape[1]
    temperature, before, after = np.empty(positions), np.empty(positions), np.empty(positions)
    raw = fitted = np.ones(logits.shape[0])  # survival up to the position before, without and with temperatures
    for k in range(positions):
        raw = raw * sigmoid(logits[:, k])
        before[k] = ece_of_column(raw, labels[:, k], bins)
        errors = grid_errors(fitted, logits[:, k], labels[:, k], bins)
        best = _PREFERENCE[errors[_PREFERENCE] <= errors.min() + TIE][0]
        temperature[k], after[k] = GRID[best], errors[best]
        fitted = fitted * sigmoid(logits[:, k] / GRID[best])
    return Calibration(
        temperature=temperature,
        ece_before=before,
        ece_after=after,
        verification=verification,
        sampling_temperature=float(sampling_temperature),
    )


def grid_errors(survival_before: np.ndarray, logits: np.ndarray, labels: np.ndarray, bins: int) -> np.ndarray:
    """[81] ECE at one position for every temperature of `GRID`, earlier temperatures fixed.

    Args:
        survival_before: [N] float64 calibrated survival of the position before (ones at the first).
        logits: [N] float64 confidence logits of this position.
        labels: [N] float64, 0 or 1.
        bins: equal-width bins.
    """
    return np.array([ece_of_column(survival_before * sigmoid(logits / t), labels, bins) for t in GRID])


def save_tables(path: str | Path, tables: Iterable[Calibration]) -> None:
    """Write calibration.json: all tables, and the `rejection`, T = 1 one also as "temperatures".

    The file is replaced as a whole: where it cannot be written, one that is there stays as it is.

    Raises:
        ValueError: no tables, two for one rule and temperature, different lengths, or values that
            `load_tables` would refuse.
        OSError: the file cannot be written.
    """
    records = []
    for table in tables:
        record: dict[str, Any] = {
            "verification": table.verification,
            "sampling_temperature": float(table.sampling_temperature),
            "temperatures": np.asarray(table.temperature, np.float64).tolist(),
        }
        for name in ("ece_before", "ece_after"):
            if (value := getattr(table, name)) is not None:
                record[name] = np.asarray(value, np.float64).tolist()
        records.append(record)
    content: dict[str, Any] = {"tables": records}
    for record in records:
        if (record["verification"], record["sampling_temperature"]) == ("rejection", 1.0):
            content = {"temperatures": record["temperatures"], "tables": records}
    try:
        _parse(content, None)
    except ValueError as error:
        raise ValueError(f"{path} not written: {error}") from error
    write_whole(Path(path), json.dumps(content, indent=1) + "\n")


def load_tables(path: str | Path, *, positions: int | None = None) -> CalibrationTables:
    """All tables of a calibration.json.

    "temperatures" (or "sts_temperatures") at the top is the `rejection`, T = 1 table; "tables" lists them
    all, each with "verification", "sampling_temperature", "temperatures" and, if known, "ece_before" and
    "ece_after". Either alone is enough; other keys are ignored.

    Args:
        positions: the number of temperatures there must be; None = any.

    Raises:
        ValueError: not such a file: wrong length, a value that is zero, negative, not finite or no number,
            two tables for one rule and temperature that differ. The message names the file and the entry.
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
    listed = content.get("tables", [])
    if not isinstance(listed, list):
        raise ValueError(f"tables: a list expected, got {listed!r:.80}")
    tables: dict[tuple[str, float], Calibration] = {}
    for i, record in enumerate(listed):
        table = _table(record, f"tables[{i}]", positions)
        if _key(table) in tables:
            raise ValueError(f"tables[{i}]: a second table for {_key(table)}")
        tables[_key(table)] = table
    for name in ("temperatures", "sts_temperatures"):
        if name not in content:
            continue
        temperature = _positive(content[name], name, positions)
        same = tables.setdefault(("rejection", 1.0), Calibration(temperature=temperature))
        if not np.array_equal(same.temperature, temperature):
            raise ValueError(f"{name}: differs from the other table for ('rejection', 1.0) in this file")
    if not tables:
        raise ValueError("neither temperatures nor sts_temperatures nor tables found")
    lengths = {key: table.temperature.size for key, table in tables.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"tables of different lengths: {lengths}")
    return CalibrationTables(tuple(tables.values()))


def _table(record: Any, name: str, positions: int | None) -> Calibration:
    if not isinstance(record, Mapping):
        raise ValueError(f"{name}: an object expected, got {record!r:.80}")
    for field in ("verification", "sampling_temperature", "temperatures"):
        if field not in record:
            raise ValueError(f"{name}.{field}: missing")
    _check_key(record["verification"], record["sampling_temperature"], f"{name}.")
    temperature = _positive(record["temperatures"], f"{name}.temperatures", positions)
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


def _check_key(verification: Any, sampling_temperature: Any, prefix: str = "") -> None:
    if verification not in _RULES:
        raise ValueError(f"{prefix}verification: one of {list(_RULES)} expected, got {verification!r:.80}")
    if not _is_number(sampling_temperature) or not 0.0 <= sampling_temperature < math.inf:
        raise ValueError(
            f"{prefix}sampling_temperature: a finite number >= 0 expected, got {sampling_temperature!r:.80}"
        )


def _records(confidence_logits: ArrayLike, accepted: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(confidence_logits, np.float64)
    labels = np.asarray(accepted, np.float64)
    if logits.ndim != 2 or logits.shape != labels.shape or 0 in logits.shape:
        raise ValueError(
            "confidence_logits and accepted: one shape [N, G] with N, G > 0 expected, "
            f"got {list(logits.shape)} and {list(labels.shape)}"
        )
    if not np.isfinite(logits).all():
        raise ValueError("confidence_logits: finite numbers expected")
    if not ((labels == 0.0) | (labels == 1.0)).all():
        raise ValueError("accepted: 0 or 1 expected")
    rising = np.argwhere(labels[:, 1:] > labels[:, :-1])
    if rising.size:
        raise ValueError(
            f"accepted[{rising[0][0]}]: position {rising[0][1] + 1} is accepted after one that was not; "
            "accepted[n, k] says whether drafts 1..k were all accepted"
        )
    return logits, labels
