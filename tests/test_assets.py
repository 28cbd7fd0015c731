"""What is shipped: every drafter under its limit, all of it named, and all of it in the wheel."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import dspark_jax
from dspark_jax.load import SHIPPED_DRAFTERS, check_drafter, find_drafter

PACKAGE = Path(dspark_jax.__file__).parent
ASSETS = PACKAGE / "assets"
LIMITS_MB = {"dspark": 14.0, "eagle3": 6.0}
"""Of one drafter, by method. What its weights take in int8 leaves little room: a float copy does not pass."""
TOGETHER_MB = 25.0


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def test_the_folders_of_assets_are_the_shipped_drafters() -> None:
    assert sorted(path.name for path in ASSETS.iterdir() if path.is_dir()) == sorted(SHIPPED_DRAFTERS)


@pytest.mark.parametrize("name", SHIPPED_DRAFTERS)
def test_a_shipped_drafter_is_small_sound_and_says_what_it_was_trained_on(name: str) -> None:
    method = name.rpartition("-")[2]
    check_drafter(name)
    assert size_mb(find_drafter(name)) <= LIMITS_MB[method]
    config = json.loads((find_drafter(name) / "config.json").read_text())
    assert config["training"]["positions"] > 0 and config["training"]["records"] > 0


def test_shipped_drafters_together_stay_under_25_mb() -> None:
    assert size_mb(ASSETS) <= TOGETHER_MB


def test_a_wheel_holds_every_file_of_the_package() -> None:
    """The globs of package-data against the files that are there."""
    patterns = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in patterns["dspark_jax"] for path in PACKAGE.glob(pattern)}
    there = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there if path.suffix != ".py"} <= packed
    shipped = {find_drafter(name) / "model.safetensors" for name in SHIPPED_DRAFTERS}
    assert shipped <= packed
