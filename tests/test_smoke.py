"""Imports every module, so that a dependency that breaks the library shows at once; checks the packaging.

CI also runs this file alone against the newest releases of all dependencies.
"""

from __future__ import annotations

import importlib
import tomllib
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dspark_jax
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.targets.model import Target

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dspark_jax", "pallas_kernels")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_a_warning(module: str) -> None:
    if module.rsplit(".", 1)[-1] in ("triton_kernel", "triton_noise"):  # imported only where Triton was chosen
        pytest.importorskip("triton", reason="triton is not installed: pip install '.[triton]'")
    importlib.import_module(module)


def test_every_folder_of_modules_is_a_package() -> None:
    """Without its __init__.py a folder works from a checkout and is missing from an installed wheel."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_every_data_file_of_the_library_is_packaged() -> None:
    """Shipped drafters and pages must match a pattern of package-data in pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as handle:
        patterns = tomllib.load(handle)["tool"]["setuptools"]["package-data"]["dspark_jax"]
    names = [pattern.removeprefix("**/") for pattern in patterns]
    left_out = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "dspark_jax").rglob("*"))
        if path.is_file() and path.suffix not in {".py", ".pyc"} and not any(fnmatch(path.name, n) for n in names)
    ]
    assert left_out == []


def test_a_tiny_random_model_drafts_and_keeps_the_greedy_text_of_plain_decoding() -> None:
    """The whole path once, jitted as in the README: configuration, parameters, drafter, cycle, generate()."""
    source = "configs/tiny/model.toml"
    config = tomllib.loads((ROOT / source).read_text(encoding="utf-8"))
    target = Target.random(decoder_config_from_hf(config["target"], source=source), jax.random.key(0))
    drafter = Drafter.random(
        drafter_config_from_hf(config["drafter"], source=source),
        jax.random.key(1),
        embed=target.params["embed_tokens"],
        head=target.params["lm_head"],
    )
    greedy = partial(dspark_jax.generate, max_new_tokens=12, sampling=dspark_jax.Sampling(temperature=0.0))
    prompts = jnp.asarray([[3, 14, 15, 92], [6, 53, 0, 0]], jnp.int32)
    lengths, seeds = jnp.asarray([4, 2], jnp.int32), jnp.zeros((2,), jnp.uint32)
    drafted = jax.jit(greedy)(target, drafter, prompts, lengths, seeds=seeds)
    plain = jax.jit(greedy)(target, None, prompts, lengths, seeds=seeds)
    assert drafted.tokens.tolist() == plain.tokens.tolist()
    assert (drafted.offered > 0).any() and not plain.offered.any()
    assert (1 + drafted.committed.sum(axis=1)).tolist() == drafted.lengths.tolist() == [12, 12]
