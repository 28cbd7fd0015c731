"""Names, files and models meet here: what a user calls a model becomes a Target or a Drafter."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax import sharding
from dspark_jax.calibrate.tables import load_tables
from dspark_jax.checkpoint import RenamedSource, SafetensorsSource, TensorSource, require_dtype, restore
from dspark_jax.checkpoint.drafter_files import (
    CALIBRATION_FILE,
    CONFIG_FILE,
    EMBED,
    TargetView,
    read_config,
    read_drafter,
)
from dspark_jax.checkpoint.gguf import GGUFSource, decoder_config_from_gguf
from dspark_jax.checkpoint.tokenizer import tokenizer_from_directory, tokenizer_from_gguf
from dspark_jax.config import DecoderConfig
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.data import ngrams
from dspark_jax.drafters import KINDS, LoadedDrafter, NgramDrafter, drafter_specs
from dspark_jax.nn.linear import Int8Matrix, quantize_rows
from dspark_jax.params import ParamSpec
from dspark_jax.targets import Target, decoder_specs
from dspark_jax.targets.embedded import EMBEDDED, find_embedded

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float64")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SHIPPED_DRAFTERS = ("smollm2-135m-instruct-dspark", "smollm2-135m-instruct-eagle3")
"""Folders of ``assets``, each named after its target and method."""
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")


QUANTIZATIONS = ("int8",)


def load_target(
    path: str | os.PathLike[str], *, dtype: Any = "auto", mesh: Mesh | None = None, quantization: str | None = None
) -> Target:
    """Loads a target model; nothing is fetched from the network.

    Args:
        path: ``"smollm2-135m-instruct"`` (the embedded default), a ``.gguf`` file, a Hugging Face directory
            (safetensors, sharded or not), or a Hugging Face hub id that is already in the local cache.
        dtype: ``"auto"`` (float32 on CPU, bfloat16 elsewhere), ``"float32"``, ``"bfloat16"``, ``"float64"``
            (needs ``jax_enable_x64``), or the JAX dtype.
        mesh: devices to spread the weights over (``sharding.RULES``); None: the default device.
        quantization: ``"int8"``: the matrices of the layers as integers of one byte with a scale for each output
            channel, made on the host as they are read; embedding, head and norms stay as they are. A memory saver:
            the target is then slightly another model (benchmarks/results/int8_smollm2.json).

    Returns:
        A Target. Its tokenizer is None where the directory has none.

    Raises:
        FileNotFoundError: nothing of that name; the message says what to do.
        ValueError: an unsupported or corrupt checkpoint; one message with everything that is wrong.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, found {quantization!r}")
    dtype = resolve_dtype(dtype)
    put = sharding.putter(mesh)
    if quantization == "int8":
        put = _int8_putter(put)
    name = os.fspath(path)
    place = find_model(name)
    if place.is_file():
        return _load_gguf(place, name if name in EMBEDDED else place.stem, dtype, put)
    return _load_directory(place, name if _HUB_ID.fullmatch(name) else place.resolve().name, dtype, put)


def _int8_putter(put: Callable[..., Any]) -> Callable[..., Any]:
    """``put`` with the matrices of layers quantised on their way to the device."""

    def placed(array: np.ndarray, spec: ParamSpec) -> Any:
        if ".layers." not in f".{spec.name}" or len(spec.shape) != 2:
            return put(array, spec)
        values, scale = quantize_rows(array)
        channel = dataclasses.replace(spec, shape=spec.shape[:1], axes=spec.axes[:1])
        return Int8Matrix(put(values, spec), put(scale, channel))

    return placed


def load_drafter(
    path: str | os.PathLike[str], target: Target, *, dtype: Any = "auto", mesh: Mesh | None = None
) -> LoadedDrafter | NgramDrafter:
    """Loads a drafter for ``target``; nothing is fetched from the network.

    Args:
        path: ``"smollm2-135m-instruct-dspark"`` (shipped with the package), a directory in DeepSpec's or
            speculators' layout or of n-gram tables (``data.ngrams``), or a Hugging Face hub id that is already in the
            local cache.
        target: the model it drafts for; embedding and head are shared where the checkpoint's copies equal its
            own or are absent.
        dtype: as in ``load_target``; ``"auto"``: the target's.
        mesh: as in ``load_target``.

    Returns:
        A drafter of the kind that the checkpoint is (``drafters.KINDS``); ``calibration``: the tables of a
        ``calibration.json`` beside the weights, else None.

    Raises:
        FileNotFoundError: nothing of that name.
        ValueError: an unsupported or corrupt checkpoint, a drafter of another target, a calibration of
            another block size; the message names the file.
    """
    dtype = target.dtype if isinstance(dtype, str) and dtype == "auto" else resolve_dtype(dtype)
    name = os.fspath(path)
    place = find_drafter(name)
    if (place / CONFIG_FILE).is_file() and ngrams.is_ngram(read_json(place / CONFIG_FILE)):
        return _load_ngrams(place, target, dtype)
    put = sharding.putter(mesh)
    pieces = read_drafter(place, drafter_specs, target=target_view(target), dtype=np.dtype(dtype), put=put)
    config, d2t, file = pieces.config, pieces.d2t, place / CALIBRATION_FILE
    if EMBED in pieces.own:  # a frozen copy: of another target, unless somebody trained it
        logger.warning(
            "%s: its own %s differs from the embedding of %s; a drafter of another target drafts badly (its text is "
            "exact all the same)",
            place,
            EMBED,
            target.name or "the target",
        )
    # A chain has no confidences that a table could correct.
    tables = load_tables(file, positions=config.block_size) if file.is_file() and not config.chain else None
    return KINDS[config.method].build(
        pieces.params,
        config,
        embed=pieces.embed,
        head=pieces.head,
        d2t=None if d2t is None else put(d2t, ParamSpec(d2t.shape, (None,), "d2t", integer=True)),
        calibration=tables,
        name=name if name in SHIPPED_DRAFTERS or _HUB_ID.fullmatch(name) else place.resolve().name,
        vocab_limit=target.vocab_limit,
    )


def _load_ngrams(place: Path, target: Target, dtype: jnp.dtype) -> NgramDrafter:
    config, tables = ngrams.load(place)
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{place}: n-grams of a vocabulary of {config.vocab_size}, but the target has {target.vocab_size} tokens"
        )
    return NgramDrafter.build(config, tables, name=place.name, vocab_limit=target.vocab_limit, dtype=dtype)


def target_view(target: Target) -> TargetView:
    """What reading a drafter's checkpoint needs of its target."""
    embed, tokenizer = target.params["embed_tokens"], target.tokenizer
    head = embed if target.config.tie_embeddings else target.params["lm_head"]
    return TargetView(target.config, embed, head, None if tokenizer is None else len(tokenizer))


def shipped_drafter(target: str, method: str) -> str | None:
    """The name of the drafter of a method that is shipped for an embedded target, None where there is none."""
    name = f"{target}-{method}"
    return name if name in SHIPPED_DRAFTERS else None


def find_drafter(name: str) -> Path:
    """The directory that a drafter's name stands for: shipped, on disk, or in the hub's local cache."""
    if name in SHIPPED_DRAFTERS:
        place = Path(__file__).parent / "assets" / name
        if not (place / "config.json").is_file():
            raise FileNotFoundError(f"{name}: not in this installation ({place} has no config.json)")
        return place
    path = Path(name).expanduser()
    if path.is_file():
        raise ValueError(f"{path}: expected the directory that holds a drafter's config.json and weights")
    if not path.is_dir() and not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"{name}: no such directory, no hub id (owner/name) and no drafter shipped with the package "
            f"({', '.join(SHIPPED_DRAFTERS)})"
        )
    return find_model(name)


def resolve_dtype(dtype: Any) -> jnp.dtype:
    """The JAX dtype of a ``dtype`` argument; ``"auto"``: float32 on CPU (no fast bfloat16), else bfloat16.

    Raises ValueError for other dtypes, and for float64 without ``jax_enable_x64``.
    """
    if isinstance(dtype, str) and dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # numpy reads None as float64
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    require_dtype(found)
    return found


def find_model(name: str) -> Path:
    """The GGUF file or directory that a name stands for: embedded, on disk, or in the hub's local cache."""
    if name in EMBEDDED:
        return find_embedded(name)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"{path}: expected a .gguf file or the directory that holds config.json")
    if not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"{name}: no such file or directory, no hub id (owner/name) and no embedded target ({', '.join(EMBEDDED)})"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"{name}: no such directory, and not in the local Hugging Face cache; nothing is downloaded "
            f"here, fetch it first with: hf download {name}"
        ) from None


def check_drafter(path: str | os.PathLike[str]) -> None:
    """What can be said of a drafter's name before its target is loaded: there is such a directory, with a
    configuration and weights.

    Raises FileNotFoundError, ValueError: as ``load_drafter`` does.
    """
    place = find_drafter(os.fspath(path))
    if not ngrams.is_ngram(read_config(place)):
        SafetensorsSource(place)


def target_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """The configuration of what ``load_target`` would load. Reads no weights; raises what that raises."""
    place = find_model(os.fspath(path))
    return decoder_config_from_gguf(GGUFSource(place)) if place.is_file() else _directory_config(place)[0]


def _load_gguf(path: Path, name: str, dtype: jnp.dtype, put: Callable[..., Any]) -> Target:
    source = GGUFSource(path)
    config = decoder_config_from_gguf(source)
    try:
        tokenizer = tokenizer_from_gguf(source)
    except ValueError as error:
        # Token ids can still be used; a wrong tokenizer would be worse than none.
        logger.warning("%s; the target has no tokenizer", error)
        tokenizer = None
    return _build(source, config, tokenizer, name, dtype, put)


def _directory_config(path: Path) -> tuple[DecoderConfig, Mapping[str, Any]]:
    """The configuration of a target's directory, and its ``config.json``."""
    raw = read_json(path / "config.json")
    for key in ("target_layer_ids", "speculators_model_type"):
        if key in raw:
            raise ValueError(f"{path}: this is a drafter (its config has {key}): use load_drafter")
    generation = path / "generation_config.json"
    config = decoder_config_from_hf(
        raw,
        source=str(path / "config.json"),
        generation_config=read_json(generation) if generation.is_file() else None,
    )
    return config, raw


def _load_directory(path: Path, name: str, dtype: jnp.dtype, put: Callable[..., Any]) -> Target:
    config, raw = _directory_config(path)
    source = text_model_source(SafetensorsSource(path))
    if not config.tie_embeddings and "lm_head.weight" not in source.names():
        raise ValueError(
            f"{path}: the checkpoint has no lm_head.weight, but config.json does not tie it to the embedding "
            f"(tie_word_embeddings is {raw.get('tie_word_embeddings', 'absent')})"
        )
    return _build(source, config, tokenizer_from_directory(path), name, dtype, put)


def _build(
    source: TensorSource,
    config: DecoderConfig,
    tokenizer: Any,
    name: str,
    dtype: jnp.dtype,
    put: Callable[..., Any],
) -> Target:
    # A tied model may carry its head a second time.
    extra = ("lm_head.weight",) if config.tie_embeddings else ()
    params = restore(decoder_specs(config), source, np.dtype(dtype), allow_extra=extra, put=put)
    return Target.build(params, config, tokenizer=tokenizer, name=name)


def text_model_source(source: TensorSource) -> TensorSource:
    """The decoder's tensors under ``model.`` and ``lm_head.``, wherever a checkpoint keeps them.

    Multimodal containers prefix the text part with ``model.language_model.`` or ``language_model.model.`` and
    hold further towers, which are left out; a bare decoder has no prefix at all.
    """
    names = source.names()
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), "model.")
    if prefix == "model.":
        return source
    heads = ("lm_head.", "language_model.lm_head.")

    def rename(name: str) -> str | None:
        for head in heads:
            if name.startswith(head):
                return "lm_head." + name.removeprefix(head)
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else None

    return RenamedSource(source, rename)


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a file; errors name the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value
