"""Reading a drafter's directory, in whichever layout its config is written, against its target.

DeepSpec's and speculators' checkpoints share their tensor names; what differs is the config (``drafter_io``)
and which copies of the target's weights they carry. The result are pieces, not a model: this room knows no
drafters, so the parameter tree comes in as a function of the config.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.int8_rows import Int8RowsSource
from dspark_jax.checkpoint.restore import Put, TensorSource, restore, restore_abstract
from dspark_jax.checkpoint.safetensors import SafetensorsSource
from dspark_jax.checkpoint.vocabulary import Refit, read_d2t, refit
from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.params import ParamSpec
from dspark_jax.types import Array, PyTree

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIG_FILE, WEIGHTS_FILE, CALIBRATION_FILE = "config.json", "model.safetensors", "calibration.json"

# speculators' trainer keeps frozen copies of its verifier under these names; older exports contain them.
COPIES = (EMBED, HEAD, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")

SpecsOf = Callable[[DrafterConfig], PyTree]
"""``drafters.drafter_specs``: the abstract parameter tree of a config, with DeepSpec's tensor names."""


@dataclasses.dataclass(frozen=True)
class TargetView:
    """What a drafter's checkpoint is read against.

    Attributes:
        config: the target's configuration.
        embed: ``[V, d]``, in the dtype the target runs in.
        head: ``[V, d]``; the same array as ``embed`` where the two are tied.
        tokenizer_length: tokens that the tokenizer knows, None without one; rows beyond it are padding.
    """

    config: DecoderConfig
    embed: Array
    head: Array
    tokenizer_length: int | None = None


@dataclasses.dataclass(frozen=True)
class DrafterPieces:
    """A read checkpoint: the arguments of ``Drafter.build``.

    Attributes:
        config: in the target's vocabulary.
        params: tree of ``specs_of(config)``.
        embed: ``[V, d]``, the target's own array where the copy equals it; None if neither has it.
        head: ``[Vd, d]``, rows in draft ids; likewise.
        d2t: ``[Vd]`` int32 target ids, None for the whole vocabulary.
        own: those of ``EMBED`` and ``HEAD`` that the checkpoint has and that differ from the target's.
    """

    config: DrafterConfig
    params: PyTree
    embed: Any
    head: Any
    d2t: np.ndarray | None
    own: frozenset[str] = frozenset()


def read_config(directory: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint directory.

    Raises FileNotFoundError where it is missing, ValueError where it is no JSON object; both name the file.
    """
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a drafter is a directory with {CONFIG_FILE} and weights")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(config).__name__}")
    return config


def read_drafter(
    directory: str | Path,
    specs_of: SpecsOf,
    *,
    target: TargetView | None = None,
    dtype: Any = None,
    put: Put | None = None,
    allow_extra: Sequence[str] = (),
) -> DrafterPieces:
    """Reads a drafter's directory (DeepSpec or speculators layout).

    Args:
        directory: holds ``config.json`` and safetensors weights.
        specs_of: the parameter tree of a config.
        target: checked against the drafter, and the source of embedding and head where the checkpoint has no
            copies. None: nothing is checked and absent copies stay None (conversion).
        dtype: of the result; None: as stored (float32 for int8 rows).
        put: places one host array.
        allow_extra: further tensor names (patterns) that may be there and are ignored.

    Raises:
        FileNotFoundError, ValueError: all that ``drafter_config_from_hf``, ``restore``, ``read_d2t`` refuse;
            a drafter of another target; a copy of embedding or head of a wrong shape. All name the directory.
    """
    where = str(directory)
    config, source = _open(directory, None if target is None else target.config.num_layers)
    if target is not None:
        check_target(config, target.config, where)
    d2t = read_d2t(source, config)
    vocab = config.decoder.vocab_size if target is None else target.config.vocab_size
    fit = refit(config, d2t, vocab, None if target is None else target.tokenizer_length, where)
    dtype = stored_dtype(directory) if dtype is None else np.dtype(dtype)
    rows: dict[str, np.ndarray] = {}
    if fit.config.decoder.vocab_size != config.decoder.vocab_size:
        index = np.arange(vocab)
        rows = {W1: np.where(index < config.decoder.vocab_size, index, -1), W2: fit.rows}
    options: dict[str, Any] = {} if put is None else {"put": put}
    params = restore(
        specs_of(fit.config),
        RowsSource(source, rows),
        dtype,
        allow_extra=(*COPIES, *allow_extra),
        **options,
    )
    embed = _embedding(source, config, fit, target, dtype, options)
    head = _head(source, config, d2t, fit, target, dtype, options)
    own = {name for name in (EMBED, HEAD) if name in source.names()}
    if target is not None and embed is target.embed:
        own.discard(EMBED)
    if target is not None and HEAD in own:
        rows_of_target = target.head if fit.d2t is None else np.asarray(target.head)[fit.d2t]
        if head is target.head or _same_bits(np.asarray(head), rows_of_target, dtype):
            own.discard(HEAD)
    return DrafterPieces(fit.config, params, embed, head, fit.d2t, frozenset(own))


def inspect_drafter(
    directory: str | Path, specs_of: SpecsOf, *, dtype: Any = np.float32, allow_extra: Sequence[str] = ()
) -> tuple[DrafterConfig, PyTree]:
    """Config and parameter tree of ``jax.ShapeDtypeStruct`` of a directory; reads no weights but d2t and t2d.

    Raises what ``read_drafter`` raises for names, shapes and maps.
    """
    config, source = _open(directory)
    read_d2t(source, config)
    if EMBED in source.names():
        _require_shape(source, EMBED, (config.decoder.vocab_size, config.decoder.hidden_size))
    if HEAD in source.names():
        _head_rows(source, config, None)
    tree = restore_abstract(specs_of(config), source, dtype, allow_extra=(*COPIES, *allow_extra))
    return config, tree


def _open(directory: str | Path, target_layers: int | None = None) -> tuple[DrafterConfig, Int8RowsSource]:
    raw = read_config(directory)
    stored = SafetensorsSource(directory)
    source = Int8RowsSource(stored, raw.get("quantization"))
    path = str(Path(directory) / CONFIG_FILE)
    names = source.names()
    return drafter_config_from_hf(raw, source=path, tensor_names=names, target_layers=target_layers), source


def stored_dtype(directory: str | Path) -> np.dtype:
    """Float dtype of a drafter's weights: that of ``fc``; float32 where it is stored as int8 rows."""
    stored = SafetensorsSource(directory)
    return stored.dtype("fc.weight") if "fc.weight" in stored.names() else np.dtype(np.float32)


def check_target(config: DrafterConfig, target: DecoderConfig, source: str) -> None:
    """Raises ValueError, listing every reason, where a drafter was not made for this target.

    The vocabulary is compared by ``vocabulary.refit``. The last decoder layer cannot be tapped: the reference
    reads the hidden states of transformers, which hold the normalised final state in its place. An MTP module is
    ours, and reads just that layer's output.
    """
    problems = []
    mine, layers = config.decoder.hidden_size, target.num_layers
    if mine != target.hidden_size:
        problems.append(f"hidden_size is {mine}, the target's {target.hidden_size}")
    if config.num_target_layers and config.num_target_layers != layers:
        problems.append(f"it was trained for a target of {config.num_target_layers} layers, this one has {layers}")
    beyond = [i for i in config.target_layer_ids if i >= layers]
    if beyond:
        problems.append(f"target_layer_ids {beyond} do not exist in a target of {layers} layers")
    if layers - 1 in config.target_layer_ids and config.method != "mtp":
        problems.append(f"target_layer_ids has {layers - 1}, the last decoder layer, which cannot be tapped")
    if problems:
        raise ValueError(f"{source}: drafter of another target: {'; '.join(problems)}")


class RowsSource:
    """A source some of whose matrices show other rows: ``rows[name]`` lists them, -1 is a row of zeros."""

    def __init__(self, source: TensorSource, rows: Mapping[str, np.ndarray]) -> None:
        self.path = source.path
        self._source = source
        self._rows = rows

    def names(self) -> Collection[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (len(self._rows[name]), *shape[1:]) if name in self._rows else shape

    def read(self, name: str) -> np.ndarray:
        array = self._source.read(name)
        rows = self._rows.get(name)
        if rows is None or (len(rows) == len(array) and np.array_equal(rows, np.arange(len(rows)))):
            return array
        out = array[np.maximum(rows, 0)]
        out[rows < 0] = 0
        return out


def _require_shape(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    if source.shape(name) != shape:
        raise ValueError(f"{source.path}: {name} is {source.shape(name)}, expected {shape}")


def _copy(source: TensorSource, name: str, rows: np.ndarray | None, dtype: np.dtype, options: Mapping[str, Any]) -> Any:
    """One matrix of the checkpoint, cast, checked and placed as ``restore`` does."""
    view = RowsSource(source, {} if rows is None else {name: rows})
    spec = ParamSpec(view.shape(name), ("vocab", "embed"), name)
    return restore({name: spec}, view, dtype, allow_extra=("*",), **options)[name]


def _embedding(
    source: TensorSource,
    config: DrafterConfig,
    fit: Refit,
    target: TargetView | None,
    dtype: np.dtype,
    options: Mapping[str, Any],
) -> Any:
    if EMBED in source.names():
        _require_shape(source, EMBED, (config.decoder.vocab_size, config.decoder.hidden_size))
        if target is not None and _same_bits(source.read(EMBED), target.embed, dtype):
            return target.embed
        return _copy(source, EMBED, None, dtype, options)
    if target is None:
        return None
    if config.mask_token_id >= target.config.vocab_size:
        raise ValueError(
            f"{source.path}: mask_token_id {config.mask_token_id} is beyond the target's vocabulary of"
            f" {target.config.vocab_size}, and the checkpoint has no {EMBED} of its own"
        )
    return _as_dtype(target.embed, dtype)


def _head_rows(source: TensorSource, config: DrafterConfig, d2t: np.ndarray | None) -> np.ndarray | None:
    """Rows of the checkpoint's head that stand for the draft ids: all of them, or those that d2t lists."""
    rows, hidden = config.draft_vocab_size, config.decoder.hidden_size
    if source.shape(HEAD) == (rows, hidden):
        return None
    if source.shape(HEAD) == (config.decoder.vocab_size, hidden):
        return d2t
    raise ValueError(
        f"{source.path}: {HEAD} is {source.shape(HEAD)}, expected ({rows}, {hidden}) in draft ids or"
        f" ({config.decoder.vocab_size}, {hidden}) in target ids"
    )


def _head(
    source: TensorSource,
    config: DrafterConfig,
    d2t: np.ndarray | None,
    fit: Refit,
    target: TargetView | None,
    dtype: np.dtype,
    options: Mapping[str, Any],
) -> Any:
    if HEAD in source.names():
        if fit.d2t is None and target is not None and _same_bits(source.read(HEAD), target.head, dtype):
            return target.head
        rows = _head_rows(source, config, d2t)
        return _copy(source, HEAD, fit.rows if rows is None else rows[fit.rows], dtype, options)
    if target is None:
        return None
    if fit.d2t is None:
        return _as_dtype(target.head, dtype)
    rows_of_target = np.asarray(target.head)[fit.d2t]  # on the host: the head may be cut across devices
    return _copy(_ArraySource(source.path, HEAD, rows_of_target), HEAD, None, dtype, options)


class _ArraySource:
    """One array in memory as a checkpoint, so that it is placed like any other tensor."""

    def __init__(self, path: Path, name: str, array: Any) -> None:
        self.path = path
        self._name, self._array = name, array

    def names(self) -> Collection[str]:
        return [self._name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._array.shape)

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._array)


def _as_dtype(array: Any, dtype: np.dtype) -> Any:
    return array if array.dtype == dtype else array.astype(dtype)


def _same_bits(own: np.ndarray, other: Any, dtype: np.dtype) -> bool:
    """The checkpoint's copy, cast to ``dtype``, equals the target's array bit for bit.

    Then the target's is used instead: at Qwen3-8B's size the two copies are 2.5 GB.
    """
    if tuple(own.shape) != tuple(other.shape) or other.dtype != dtype:
        return False
    host = np.asarray(other)
    step = 1 << 14  # rows at a time: the cast never doubles the copy
    for i in range(0, len(own), step):
        a, b = own[i : i + step].astype(dtype), host[i : i + step]
        if a.tobytes() != b.tobytes():
            return False
    return True
