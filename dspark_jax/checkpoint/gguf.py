"""GGUF files as a source of tensors under Hugging Face names, and their metadata as a DecoderConfig.

Architectures are rows of ``ARCHITECTURES``. Trap: llama.cpp stores the rows of the query and key projections
of ``llama`` files permuted (it rotates neighbouring pairs, Hugging Face rotates halves); they are put back.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.gguf_file import GGUFFile, TensorInfo
from dspark_jax.checkpoint.gguf_quants import QUANT_TYPES, decode
from dspark_jax.config import DecoderConfig
from dspark_jax.config_io import decoder_config_from_hf


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one ``general.architecture`` maps to Hugging Face's model_type.

    ``permuted``: modules whose output rows are permuted, with the metadata key of their number of heads.
    """

    model_type: str
    permuted: Mapping[str, str]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}),
    "qwen3": Architecture("qwen3", {}),
}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # read by the config, not a parameter


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, None for a tensor without one."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None:
        return None
    layer, module, kind = found.groups()
    table = _TOP if layer is None else _BLOCK
    if module not in table:
        return None
    return f"{'' if layer is None else f'model.layers.{layer}.'}{table[module]}.{kind}"


class GGUFSource:
    """Tensors of a GGUF file of a known architecture, under Hugging Face names, dequantised when read.

    Tensors without a Hugging Face name keep their own, so that restoring lists them as unexpected.

    Attributes:
        path: the file.
        metadata: the file's metadata (see ``GGUFFile``).
        architecture: row of ``ARCHITECTURES``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what ``GGUFFile`` refuses; an unsupported architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = GGUFFile(path)
        self.path = self.file.path
        self.metadata = self.file.metadata
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: unsupported GGUF architecture {name!r}; supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[name]
        self._tensors = {hf_name(key) or key: info for key, info in self.file.tensors.items() if key != _ROPE_FACTORS}

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value of the architecture: ``get("block_count")`` reads ``llama.block_count``."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """Weights in float32, or in the stored dtype where they are not quantised."""
        info = self._tensors[name]
        raw = self.file.raw(info)
        heads = self._permuted_heads(info)
        if heads:
            # Whole rows move, and blocks never cross rows, so this is done on the smaller quantised bytes.
            raw = raw.reshape(info.shape[0], -1)[_row_order(info.shape[0], heads)].reshape(-1)
        return decode(raw, info.type_id, f"{self.path}: tensor {info.name}").reshape(info.shape)

    def _permuted_heads(self, info: TensorInfo) -> int:
        """Heads of a tensor whose rows are permuted, 0 for all others."""
        parts = info.name.split(".")
        if len(parts) != 4 or parts[2] not in self.architecture.permuted:
            return 0
        heads = self.get(self.architecture.permuted[parts[2]]) or self.get("attention.head_count")
        return int(np.max(heads))


def _row_order(rows: int, heads: int) -> np.ndarray:
    """Where row i of the Hugging Face matrix is stored: pair-major in the file, half-major here."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


_NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}


def decoder_config_from_gguf(source: GGUFSource) -> DecoderConfig:
    """The configuration that a GGUF file's metadata and tensors describe.

    Raises:
        ValueError: missing metadata, listed, or features that are not supported, listed.
    """
    missing = [key for key in _NEEDED if source.get(key) is None]
    tokens = "token_embd.weight"
    if missing or tokens not in source.file.tensors:
        listed = [f"{source.metadata['general.architecture']}.{key}" for key in missing]
        listed += [] if tokens in source.file.tensors else [f"tensor {tokens}"]
        raise ValueError(f"{source.path}: the GGUF file lacks {', '.join(listed)}")
    problems: list[str] = []
    config: dict[str, Any] = {name: _uniform(source, key, problems) for key, name in _NEEDED.items()}
    config["model_type"] = source.architecture.model_type
    config["vocab_size"] = source.file.tensors[tokens].shape[0]
    config["num_key_value_heads"] = _uniform(source, "attention.head_count_kv", problems)
    config["head_dim"] = _head_dim(source, config, problems)
    config["num_experts"] = source.get("expert_count", 0)
    config["tie_word_embeddings"] = "output.weight" not in source.file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in source.file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in source.file.tensors
    config["rope_parameters"] = _rope(source, config, problems)
    window = source.get("attention.sliding_window", 0)
    if window and window < config["max_position_embeddings"]:
        problems.append(f"sliding-window attention ({window})")
    if problems:
        raise ValueError(f"{source.path}: unsupported: {'; '.join(problems)}")
    config.update(_token_ids(source))
    return decoder_config_from_hf(config, source=str(source.path))


def _uniform(source: GGUFSource, key: str, problems: list[str]) -> Any:
    """A metadata value; per-layer arrays are accepted where all layers agree."""
    value = source.get(key)
    if isinstance(value, np.ndarray):
        if len(set(value.tolist())) > 1:
            problems.append(f"{key} differs between layers")
        value = value[0].item()
    # Stored as float32, 1e-5 comes back as 9.999999747e-06; its shortest spelling is what was meant.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(source: GGUFSource, config: Mapping[str, Any], problems: list[str]) -> int:
    head_dim = source.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.get(key, head_dim) != head_dim:
            problems.append(f"{key} = {source.get(key)} with heads of {head_dim}")
    return head_dim


def _rope(source: GGUFSource, config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    theta = _uniform(source, "rope.freq_base", problems) or 10000.0
    trained = source.get("rope.scaling.original_context_length")
    factors = source.file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        values = decode(source.file.raw(factors), factors.type_id, str(source.path)).astype(np.float64)
        return _llama3_rope(values, theta, trained or 8192, problems)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind = source.get("rope.scaling.type", "linear" if source.get("rope.scale_linear") else "none")
    factor = source.get("rope.scaling.factor", source.get("rope.scale_linear", 1.0))
    if kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        if source.get("rope.scaling.attn_factor", 1.0) != 1.0:
            problems.append(f"rope.scaling.attn_factor = {source.get('rope.scaling.attn_factor')}")
    elif kind not in ("none", "linear"):
        problems.append(f"rope.scaling.type = {kind}")
    return rope


def _llama3_rope(factors: np.ndarray, theta: float, trained: int, problems: list[str]) -> dict[str, Any]:
    """Llama 3's rope scaling, which a GGUF file holds only as one divisor for each frequency.

    The parameters are recovered (all published ones blend from 1 to 4 turns) and must give the divisors back.
    """
    low, high, factor = 1.0, 4.0, float(factors.max())
    head_dim = 2 * factors.size
    turns = trained / (2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1.0 / ((1.0 - blend) / factor + blend), factors, rtol=1e-4):
        problems.append(f"{_ROPE_FACTORS} holds frequencies that are not Llama 3's")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _token_ids(source: GGUFSource) -> dict[str, Any]:
    """bos, pad and the tokens that end a text: end of text, of turn and of message."""
    ids = {key: source.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    ends = dict.fromkeys(value for value in ids.values() if value is not None)
    return {
        "bos_token_id": source.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": source.metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": list(ends) or None,
    }


__all__ = ["ARCHITECTURES", "QUANT_TYPES", "GGUFSource", "decoder_config_from_gguf", "hf_name"]
