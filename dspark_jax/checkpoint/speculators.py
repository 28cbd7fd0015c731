"""The layout of vllm-project/speculators: DeepSpec's tensor names under another config, with d2t and t2d.

A checkpoint carries its head only where the draft vocabulary is trimmed (no engine derives those rows) and
no embedding. Older exports carry frozen copies of their verifier's norm and head too, which are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoint.deepspec import drafter_tensors, write_directory
from dspark_jax.checkpoint.drafter_files import (
    W2,
    DrafterPieces,
    SpecsOf,
    TargetView,
    read_config,
    read_drafter,
)
from dspark_jax.checkpoint.restore import Put
from dspark_jax.config import DrafterConfig
from dspark_jax.drafter_io import drafter_config_to_speculators, speculators_type
from dspark_jax.params import ParamSpec, is_spec
from dspark_jax.types import PyTree


def read_speculators(
    directory: str | Path,
    specs_of: SpecsOf,
    *,
    target: TargetView | None = None,
    dtype: Any = None,
    put: Put | None = None,
) -> DrafterPieces:
    """Reads a directory in speculators' layout; arguments and errors as ``drafter_files.read_drafter``.

    Raises ValueError where the directory is in another layout.
    """
    if speculators_type(read_config(directory)) is None:
        raise ValueError(f"{directory}: no speculators_model_type in its config, expected speculators' layout")
    return read_drafter(directory, specs_of, target=target, dtype=dtype, put=put)


def write_speculators(
    directory: str | Path,
    config: DrafterConfig,
    params: PyTree,
    specs: PyTree,
    *,
    d2t: Any = None,
    embed: Any = None,
    head: Any = None,
    dtype: Any = None,
    verifier: str | None = None,
    verifier_architectures: Sequence[str] = (),
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a directory in speculators' layout, the draft vocabulary in ascending order of target ids.

    speculators derives head rows from the mask t2d, that is in ascending order: another order of d2t would
    meet wrong rows there. Head and W2 rows are permuted along; the drafter stays the same.

    Args:
        directory, config, params, specs, d2t, embed, dtype, extra_config: as ``write_deepspec``.
        head: ``[Vd, d]``, required where the vocabulary is trimmed.
        verifier: name or path of the target, verifier_architectures: its architectures; for the config.

    Returns:
        The directory.

    Raises:
        ValueError: as ``write_deepspec``; a trimmed vocabulary without its head rows.
    """
    if config.trimmed:
        if head is None or d2t is None:
            raise ValueError("a trimmed draft vocabulary needs its d2t and head rows in the speculators layout")
        config, params, d2t, head = _ascending(config, params, specs, np.asarray(d2t), np.asarray(head))
    tensors = drafter_tensors(config, params, specs, d2t=d2t, embed=embed, head=head, dtype=dtype)
    content = drafter_config_to_speculators(config, verifier=verifier, verifier_architectures=verifier_architectures)
    return write_directory(directory, {**content, **(extra_config or {})}, tensors)


def _ascending(
    config: DrafterConfig, params: PyTree, specs: PyTree, d2t: np.ndarray, head: np.ndarray
) -> tuple[DrafterConfig, PyTree, np.ndarray | None, np.ndarray]:
    """The drafter with draft ids in the order of their target ids; a whole vocabulary then needs no map."""
    order = np.argsort(d2t, kind="stable")

    def rows(spec: ParamSpec, value: Any) -> Any:
        return np.asarray(value)[order] if spec.name == W2 else value

    params = jax.tree.map(rows, specs, params, is_leaf=is_spec)
    if config.draft_vocab_size == config.decoder.vocab_size:
        return dataclasses.replace(config, trimmed=False), params, None, head[order]
    return config, params, d2t[order], head[order]
