"""Rows of a Hugging Face data set that lies in the local cache; nothing is fetched from the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

PREFIX = "hf:"
"""Of a source that names a data set: ``hf:owner/name``, ``hf:owner/name@config``."""


def rows(source: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """The rows of ``source``, with the columns that ``data.prompts.parse_record`` reads.

    The package ``datasets`` (extra ``hf``) is imported here and not before, and told to stay off the network.

    Raises:
        ValueError: the package is missing, or the data set has no such split or configuration.
        FileNotFoundError: not in the cache.
        Each says what to do.
    """
    name, _, config = source.removeprefix(PREFIX).partition("@")
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the package is imported
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{source}: needs the package datasets ({error}); pip install 'dspark-jax[hf]'") from None
    if not datasets.config.HF_DATASETS_OFFLINE:  # it was imported earlier, by somebody else
        datasets.config.HF_DATASETS_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        data = datasets.load_dataset(name, config or None, split=split)
    except (ConnectionError, FileNotFoundError):
        call = f"datasets.load_dataset({name!r}{f', {config!r}' if config else ''})"
        raise FileNotFoundError(
            f"{source}: not in the local cache of data sets, and nothing is downloaded here; fetch it first with: "
            f'python -c "import datasets; {call}"'
        ) from None
    except ValueError as error:
        raise ValueError(f"{source}, split {split}: {' '.join(str(error).split())}") from None
    for row in data:
        yield dict(row)
