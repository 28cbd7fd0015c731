"""TOML files and --set overrides: nested tables, types, and errors that list the keys that exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from dspark_jax.config_toml import from_mapping, load_toml


@dataclasses.dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["cosine", "constant"] = "cosine"


@dataclasses.dataclass(frozen=True)
class Run:
    steps: int
    name: str = "run"
    layers: tuple[int, ...] = ()
    resume: Path | None = None
    ratio: float | None = None
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, found {self.steps}")


def write(path: Path, text: str) -> Path:
    (path / "run.toml").write_text(text)
    return path / "run.toml"


def test_tables_become_dataclasses_and_arrays_tuples(tmp_path: Path) -> None:
    path = write(tmp_path, 'steps = 10\nlayers = [1, 2]\nresume = "a/b"\n[optimizer]\nlearning_rate = 1\n')
    run = load_toml(path, Run)
    assert run == Run(10, layers=(1, 2), resume=Path("a/b"), optimizer=Optimizer(learning_rate=1.0))


def test_overrides_win_in_order_and_may_be_plain_text(tmp_path: Path) -> None:
    path = write(tmp_path, "steps = 10\n")
    overrides = [
        "steps=20",
        "optimizer.learning_rate=3e-4",
        "name=a=b c",
        "layers=[3]",
        "steps=30",
        "ratio=2",
    ]
    assert load_toml(path, Run, overrides) == Run(30, "a=b c", (3,), ratio=2.0, optimizer=Optimizer(3e-4))
    assert load_toml(None, Run, ["steps=1"]) == Run(1)


def test_unknown_missing_and_wrong_keys_are_listed_in_one_error(tmp_path: Path) -> None:
    path = write(tmp_path, 'stepz = 10\nname = 3\nlayers = ["x"]\n[optimizer]\nlr = 1.0\nschedule = "step"\n')
    with pytest.raises(ValueError) as error:
        load_toml(path, Run)
    assert str(error.value).splitlines() == [
        f"{path}: this configuration cannot be used",
        "  unknown key stepz; the top level knows: steps, name, layers, resume, ratio, optimizer",
        "  missing key steps",
        "  name must be str, found 3",
        "  layers[0] must be int, found 'x'",
        "  unknown key optimizer.lr; [optimizer] knows: learning_rate, betas, schedule",
        "  optimizer.schedule must be one of cosine, constant, found 'step'",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": True}, "steps must be int, found True"),
        ({"steps": 1.5}, "steps must be int, found 1.5"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"steps": 1, "optimizer": 3}, "optimizer must be Optimizer, found 3"),
        ({"steps": 1, "optimizer": {"betas": [0.9]}}, "optimizer.betas must have 2 entries, found 1"),
        ({"steps": 1, "resume": 3}, "resume must be Path, found 3"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_mapping(Run, values, source="test")


def test_bad_files_and_overrides_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.toml: no such file"):
        load_toml(tmp_path / "none.toml", Run)
    with pytest.raises(ValueError, match=r"run\.toml: .*line 1"):
        load_toml(write(tmp_path, "steps = \n"), Run)
    for text in ("steps", "=3", "a..b=1"):
        with pytest.raises(ValueError, match="expected key=value"):
            load_toml(None, Run, [text])
    with pytest.raises(ValueError, match="steps is no table"):
        load_toml(None, Run, ["steps=1", "steps.x=2"])
