"""DeepSpec's layout: a directory with ``config.json`` and ``model.safetensors``, read and written.

Tensors: ``fc``, ``hidden_norm``, ``layers.N.*``, ``norm``, ``markov_head.*``, ``confidence_head.proj``, and
copies of the target's ``embed_tokens`` and ``lm_head``, which may be left out. Two extensions are ours, both
marked in the config: a trimmed draft vocabulary (``draft_vocab_size``, tensors ``d2t``, ``t2d``; W1 in target
ids, W2 and head rows in draft ids), and int8 rows (``int8_rows``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.checkpoint.drafter_files import (
    CALIBRATION_FILE,
    CONFIG_FILE,
    EMBED,
    HEAD,
    WEIGHTS_FILE,
    DrafterPieces,
    SpecsOf,
    TargetView,
    read_config,
    read_drafter,
)
from dspark_jax.checkpoint.int8_rows import FORMAT, quantize_tensors
from dspark_jax.checkpoint.restore import Put
from dspark_jax.checkpoint.safetensors import save
from dspark_jax.checkpoint.vocabulary import vocabulary_tensors
from dspark_jax.config import DrafterConfig
from dspark_jax.drafter_io import drafter_config_to_hf, speculators_type
from dspark_jax.params import ParamSpec, is_spec
from dspark_jax.types import PyTree

LOG = logging.getLogger("dspark_jax.checkpoint")


def read_deepspec(
    directory: str | Path,
    specs_of: SpecsOf,
    *,
    target: TargetView | None = None,
    dtype: Any = None,
    put: Put | None = None,
) -> DrafterPieces:
    """Reads a DeepSpec directory; arguments and errors as ``drafter_files.read_drafter``.

    Raises ValueError where the directory is in speculators' layout.
    """
    if speculators_type(read_config(directory)) is not None:
        raise ValueError(f"{directory}: speculators layout, expected DeepSpec's")
    return read_drafter(directory, specs_of, target=target, dtype=dtype, put=put)


def write_deepspec(
    directory: str | Path,
    config: DrafterConfig,
    params: PyTree,
    specs: PyTree,
    *,
    d2t: Any = None,
    embed: Any = None,
    head: Any = None,
    quantize: bool = False,
    dtype: Any = None,
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a DeepSpec directory; reading it back gives equal arrays (within half a step if ``quantize``).

    Args:
        directory: created if need be. The config is written last, so an interrupted write leaves no directory
            that loads. A ``calibration.json`` there belongs to the weights replaced and is removed.
        config, params, specs: the drafter; ``specs`` is ``drafter_specs(config)`` and names the tensors.
        d2t: ``[Vd]`` target ids; required exactly where ``config.trimmed``.
        embed: ``[V, d]``, head: ``[Vd, d]``: copies to include; None leaves them to the target.
        quantize: store matrices as int8 rows (``int8_rows``); copies too.
        dtype: float dtype to store; None: as they are.
        extra_config: further keys of ``config.json``.

    Returns:
        The directory.

    Raises:
        ValueError: shapes that do not fit the config, a d2t without a trimmed vocabulary or the reverse.
    """
    tensors = drafter_tensors(config, params, specs, d2t=d2t, embed=embed, head=head, dtype=dtype)
    content = drafter_config_to_hf(config)
    content["dtype"] = _dtype_name(tensors)
    if quantize:
        tensors = quantize_tensors(tensors)
        content["quantization"] = {"format": FORMAT}
    return write_directory(directory, {**content, **(extra_config or {})}, tensors)


def drafter_tensors(
    config: DrafterConfig,
    params: PyTree,
    specs: PyTree,
    *,
    d2t: Any = None,
    embed: Any = None,
    head: Any = None,
    dtype: Any = None,
) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by name, on the host; arguments and errors as ``write_deepspec``."""
    if (d2t is not None) != config.trimmed:
        raise ValueError("a trimmed draft vocabulary is written with its d2t, a whole one without")
    named: dict[str, Any] = {}

    def collect(spec: ParamSpec, value: Any) -> None:
        if value is not None:
            named[spec.name] = _host(value, spec.name, spec.shape, dtype)

    jax.tree.map(collect, specs, params, is_leaf=is_spec)
    decoder = config.decoder
    for name, value, rows in ((EMBED, embed, decoder.vocab_size), (HEAD, head, config.draft_vocab_size)):
        if value is not None:
            named[name] = _host(value, name, (rows, decoder.hidden_size), dtype)
    if d2t is not None:
        ids = _host(d2t, "d2t", (config.draft_vocab_size,), None)
        named.update(vocabulary_tensors(ids, decoder.vocab_size))
    return named


def _host(value: Any, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    return array if dtype is None else array.astype(dtype)


def _dtype_name(tensors: Mapping[str, np.ndarray]) -> str:
    """What transformers calls the weights' dtype: that of the first float tensor."""
    floats = [array.dtype for array in tensors.values() if array.dtype.kind not in "iub"]
    return str(floats[0]) if floats else "float32"


def write_directory(directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes ``config.json`` and ``model.safetensors`` so that no moment shows a config with other weights.

    The old config goes first and the new one comes last: in between the directory does not load, whatever
    stops the writer.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    if (directory / CALIBRATION_FILE).exists():
        LOG.warning("%s: removed: it was measured on the weights replaced", directory / CALIBRATION_FILE)
        (directory / CALIBRATION_FILE).unlink()
    save(directory / WEIGHTS_FILE, tensors)
    temporary = directory / f".{CONFIG_FILE}.{os.getpid()}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, directory / CONFIG_FILE)
    finally:
        temporary.unlink(missing_ok=True)
    return directory
