"""Converting drafters between DeepSpec's and speculators' layouts, and into a plain DeepSpec directory."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.checkpoint.drafter_files import (
    CALIBRATION_FILE,
    EMBED,
    HEAD,
    DrafterPieces,
    SpecsOf,
    TargetView,
    read_drafter,
    stored_dtype,
)
from dspark_jax.checkpoint.speculators import write_speculators
from dspark_jax.config import Eagle3Norms

LAYOUTS = ("deepspec", "speculators")


def convert_drafter(
    source: str | Path,
    output: str | Path,
    specs_of: SpecsOf,
    *,
    to: str,
    full: bool = False,
    quantize: bool = False,
    target: TargetView | None = None,
    verifier: str | None = None,
    dtype: Any = None,
) -> Path:
    """Reads a drafter in any layout and writes it in another. A ``calibration.json`` goes along.

    Args:
        source: the drafter's directory. output: another directory.
        specs_of: ``drafters.drafter_specs``.
        to: ``deepspec`` or ``speculators``.
        full: a plain DeepSpec directory, as other engines expect it: copies of embedding and head included,
            floats, none of our extensions.
        quantize: int8 rows (our extension of DeepSpec's layout).
        target: where embedding and head come from when the source has no copies; the drafter is checked
            against it.
        verifier: name or path of the target, written to a speculators config.
        dtype: float dtype to write; None: as stored (float32 where the source is int8).

    Returns:
        The output directory.

    Raises:
        ValueError: what the layout cannot express (a trimmed vocabulary or the fill-in layout in a plain
            DeepSpec directory), an embedding or head that nobody has, and all that reading refuses.
    """
    _check_options(source, output, to, full, quantize)
    dtype = stored_dtype(source) if dtype is None else np.dtype(dtype)
    if target is not None:  # in one dtype, so that copies equal to the target's are recognised
        target = dataclasses.replace(target, embed=target.embed.astype(dtype), head=target.head.astype(dtype))
    pieces = read_drafter(source, specs_of, target=target, dtype=dtype)
    embed, head = _copies(pieces, source, full, to)
    parts = (pieces.config, pieces.params, specs_of(pieces.config))
    if to == "speculators":
        path = write_speculators(output, *parts, d2t=pieces.d2t, embed=embed, head=head, verifier=verifier)
    else:
        path = write_deepspec(output, *parts, d2t=pieces.d2t, embed=embed, head=head, quantize=quantize)
    if (Path(source) / CALIBRATION_FILE).is_file():
        shutil.copyfile(Path(source) / CALIBRATION_FILE, path / CALIBRATION_FILE)
    return path


def _check_options(source: str | Path, output: str | Path, to: str, full: bool, quantize: bool) -> None:
    if to not in LAYOUTS:
        raise ValueError(f"unknown layout {to!r}; known: {', '.join(LAYOUTS)}")
    if (full or quantize) and to != "deepspec":
        raise ValueError("full and int8 are choices of the deepspec layout")
    if full and quantize:
        raise ValueError("a full DeepSpec directory holds floats: other engines do not read int8 rows")
    if Path(source).resolve() == Path(output).resolve():
        raise ValueError(f"{output}: output and input are the same directory")


def _check_plain(pieces: DrafterPieces, source: str | Path) -> None:
    config = pieces.config
    if config.trimmed:
        raise ValueError(
            f"{source}: its draft vocabulary has {config.draft_vocab_size} of {config.decoder.vocab_size}"
            " tokens, and a plain DeepSpec directory has no d2t map: other engines would take draft ids for"
            " target ids; the speculators layout takes it"
        )
    if config.method == "mtp":
        raise ValueError(f"{source}: DeepSpec has no class for an MTP module: other engines cannot read our layout")
    if config.method == "eagle3" and (len(config.target_layer_ids) != 5 or config.norms != Eagle3Norms()):
        raise ValueError(
            f"{source}: DeepSpec's own EAGLE-3 fuses five target layers and has no norm switches, this drafter has"
            f" {len(config.target_layer_ids)} layers and {config.norms}; the speculators layout takes it"
        )
    if not config.sample_from_anchor:
        raise ValueError(
            f"{source}: it has the fill-in layout, and DeepSpec's own is anchor-first: other engines would"
            " read every draft one position off; the speculators layout takes it"
        )


def _copies(pieces: DrafterPieces, source: str | Path, full: bool, to: str) -> tuple[Any, Any]:
    """Embedding and head to write: both for a plain directory, else what only this checkpoint has.

    The rows of a trimmed head are always part of speculators' layout.
    """
    if full:
        _check_plain(pieces, source)
        return _needed(pieces.embed, "embed_tokens", source), _needed(pieces.head, "lm_head", source)
    embed = pieces.embed if EMBED in pieces.own else None
    if to == "speculators" and pieces.config.trimmed:
        return embed, _needed(pieces.head, "lm_head", source)
    return embed, pieces.head if HEAD in pieces.own else None


def _needed(array: Any, name: str, source: str | Path) -> Any:
    if array is None:
        raise ValueError(f"{source}: has no {name}.weight of its own; name the target to take it from (--target)")
    return array
