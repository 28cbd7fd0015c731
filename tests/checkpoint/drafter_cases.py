"""Tiny drafters on disk, in every spelling of their config, for the tests of this folder."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint import SafetensorsSource, save
from dspark_jax.checkpoint.deepspec import read_deepspec, write_deepspec
from dspark_jax.checkpoint.drafter_files import DrafterPieces, TargetView
from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.drafters import drafter_specs
from dspark_jax.params import ParamSpec, is_spec
from dspark_jax.targets import Target, decoder_specs

VOCAB, HIDDEN, RANK, TARGET_LAYERS = 40, 16, 4, 5

BACKBONE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DRAFTER: dict[str, Any] = {
    "block_size": 7,
    "mask_token_id": 39,
    "target_layer_ids": [-1, 1, 3],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FLAT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": TARGET_LAYERS,
    **BACKBONE,
    **DRAFTER,
}


def flat(**changes: Any) -> dict[str, Any]:
    """DeepSpec's config with some keys changed; None removes a key."""
    config = copy.deepcopy({**FLAT, **changes})
    return {key: value for key, value in config.items() if value is not None}


def spelled(spelling: str) -> dict[str, Any]:
    """The same drafter in one of the spellings found in public checkpoints."""
    return copy.deepcopy(_spelled(spelling))


def _spelled(spelling: str) -> dict[str, Any]:
    outer = {"num_target_layers": TARGET_LAYERS, **BACKBONE}
    if spelling == "flat":
        return flat()
    if spelling == "dspark_ prefix":
        keys = {"mask_token_id": "noise_token_id"}
        return {**outer, **{f"dspark_{keys.get(key, key)}": value for key, value in DRAFTER.items()}}
    if spelling in ("dspark_config", "dflash_config"):
        return {"architectures": ["DSparkDraftModel"], **outer, spelling: DRAFTER}
    if spelling == "text_config":
        return {"num_target_layers": TARGET_LAYERS, **DRAFTER, "text_config": BACKBONE}
    if spelling == "speculators":
        own = {key: value for key, value in DRAFTER.items() if key != "target_layer_ids"}
        return {
            "speculators_model_type": "dspark",
            "architectures": ["DSparkDraftModel"],
            "model_type": "speculator_model",
            "num_target_layers": TARGET_LAYERS,
            "aux_hidden_state_layer_ids": [0, 2, 4],
            "transformer_layer_config": BACKBONE,
            **own,
        }
    raise ValueError(spelling)


SPELLINGS = ("flat", "dspark_ prefix", "dspark_config", "dflash_config", "text_config", "speculators")


def read(config: dict[str, Any], *tensor_names: str) -> DrafterConfig:
    """The normaliser under test."""
    return drafter_config_from_hf(config, source="somewhere/config.json", tensor_names=tensor_names)


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter with random weights, and what it is written with."""

    config: DrafterConfig
    specs: Any
    params: Any
    d2t: np.ndarray | None
    head: np.ndarray  # [Vd, d]
    embed: np.ndarray  # [V, d]


KINDS = ("vanilla", "gated", "rnn", "dflash", "trimmed", "permuted", "fill-in", "widths", "h only", "llama")


def case(kind: str = "vanilla", dtype: Any = jnp.float32) -> Case:
    """One of ``KINDS``."""
    config = read(flat())
    by_kind: dict[str, dict[str, Any]] = {
        "gated": {"markov_head": "gated"},
        "rnn": {"markov_head": "rnn"},
        "dflash": {
            "method": "dflash",
            "markov_rank": 0,
            "confidence_head": False,
            "confidence_with_markov": False,
        },
        "trimmed": {"draft_vocab_size": 12, "trimmed": True},
        "permuted": {"draft_vocab_size": VOCAB, "trimmed": True},
        "fill-in": {"sample_from_anchor": False, "block_size": 6},
        "widths": {"block_widths": (1, 3, 5)},
        "h only": {"confidence_with_markov": False},
        "llama": {"decoder": dataclasses.replace(config.decoder, family="llama", qk_norm=False)},
    }
    config = dataclasses.replace(config, **by_kind.get(kind, {}))
    specs = drafter_specs(config)
    rng = np.random.default_rng(3)

    def draw(spec: ParamSpec) -> Any:  # numpy, not params.init: nothing to compile
        return jnp.asarray(rng.standard_normal(spec.shape), dtype)

    params = jax.tree.map(draw, specs, is_leaf=is_spec)
    view = target_view(dtype=dtype)
    ids = None
    if config.trimmed:
        ids = rng.permutation(VOCAB)[: config.draft_vocab_size].astype(np.int32)
    head = np.asarray(view.head) if ids is None else np.asarray(view.head)[ids]
    return Case(config, specs, params, ids, head, np.asarray(view.embed))


def target_config(**changes: Any) -> DecoderConfig:
    """A Qwen3 target of five layers that the tiny drafters fit."""
    layer = LayerConfig(1, 8, RopeConfig())
    base = DecoderConfig("qwen3", VOCAB, HIDDEN, 24, 2, (layer,) * TARGET_LAYERS, qk_norm=True, max_positions=64)
    return dataclasses.replace(base, **changes)


def target_view(config: DecoderConfig | None = None, dtype: Any = jnp.float32, tokens: int | None = None) -> TargetView:
    """Untied embedding and head of that target."""
    config = config or target_config()
    rng = np.random.default_rng(11)
    shape = (config.vocab_size, config.hidden_size)
    embed, head = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    return TargetView(config, embed, head, tokens)


def target_params(dtype: Any = jnp.float32) -> Any:
    """Weights of that target: zeros but for embedding and head."""
    specs = decoder_specs(target_config())
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, dtype), specs, is_leaf=is_spec)
    view = target_view(dtype=dtype)
    return {**params, "embed_tokens": view.embed, "lm_head": view.head}


def target(dtype: Any = jnp.float32) -> Target:
    """That target as a loaded one."""
    return Target.build(target_params(dtype), target_config(), name="tiny")


def write_case(directory: Path, c: Case, **options: Any) -> Path:
    """``write_deepspec`` of a case."""
    return write_deepspec(directory, c.config, c.params, c.specs, d2t=c.d2t, **options)


def read_case(directory: Path, view: TargetView | None = None, **options: Any) -> DrafterPieces:
    """``read_deepspec`` with the parameter tree of our drafters."""
    return read_deepspec(directory, drafter_specs, target=view, **options)


def edit_tensors(directory: Path, **changes: Any) -> None:
    """Rewrites tensors of a checkpoint (``__`` stands for a dot); None removes one."""
    source = SafetensorsSource(directory)
    tensors = {name: source.read(name).copy() for name in source.names()}
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save(directory / "model.safetensors", {k: v for k, v in tensors.items() if v is not None})


def same_tree(a: Any, b: Any) -> bool:
    """Equal structure, dtypes and bits."""
    leaves_a, leaves_b = (dict(jax.tree.leaves_with_path(tree)) for tree in (a, b))
    return leaves_a.keys() == leaves_b.keys() and all(same_array(leaves_a[p], leaves_b[p]) for p in leaves_a)


def same_array(a: Any, b: Any) -> bool:
    """Equal dtype, shape and bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrites keys of ``config.json``; None removes one."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
