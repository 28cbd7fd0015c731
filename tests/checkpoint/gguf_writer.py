"""Writes GGUF files for tests: the container, llama.cpp's row permutation, and every block format we decode.

Written from the format's description, independently of the reader. Each encoder also returns the weights
that its blocks stand for, computed code by code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "BF16": 30}
Encoded = tuple[bytes, list[float]]


def _half(x: float) -> float:
    return float(np.float16(x))


def _pack_nibbles(codes: list[int]) -> bytes:
    """Byte j holds weight j (low nibble) and weight j + 16 (high nibble)."""
    return bytes((codes[j] & 15) | ((codes[j + 16] & 15) << 4) for j in range(16))


def _pack_fifth(codes: list[int]) -> bytes:
    return struct.pack("<I", sum(((code >> 4) & 1) << i for i, code in enumerate(codes)))


def _symmetric(block: np.ndarray, bits: int) -> tuple[float, list[int]]:
    """Scale and unsigned codes with the zero in the middle."""
    middle = 1 << (bits - 1)
    d = _half(np.abs(block).max() / (middle - 1)) or 1.0
    return d, [int(np.clip(round(x / d) + middle, 0, 2 * middle - 1)) for x in block.tolist()]


def _affine(block: np.ndarray, bits: int) -> tuple[float, float, list[int]]:
    m = _half(block.min())
    d = _half((block.max() - m) / ((1 << bits) - 1)) or 1.0
    return d, m, [int(np.clip(round((x - m) / d), 0, (1 << bits) - 1)) for x in block.tolist()]


def _q4_0(block: np.ndarray) -> Encoded:
    d, codes = _symmetric(block, 4)
    return struct.pack("<e", d) + _pack_nibbles(codes), [(c - 8) * d for c in codes]


def _q4_1(block: np.ndarray) -> Encoded:
    d, m, codes = _affine(block, 4)
    return struct.pack("<ee", d, m) + _pack_nibbles(codes), [c * d + m for c in codes]


def _q5_0(block: np.ndarray) -> Encoded:
    d, codes = _symmetric(block, 5)
    data = struct.pack("<e", d) + _pack_fifth(codes) + _pack_nibbles(codes)
    return data, [(c - 16) * d for c in codes]


def _q5_1(block: np.ndarray) -> Encoded:
    d, m, codes = _affine(block, 5)
    data = struct.pack("<ee", d, m) + _pack_fifth(codes) + _pack_nibbles(codes)
    return data, [c * d + m for c in codes]


def _q8_0(block: np.ndarray) -> Encoded:
    d, codes = _symmetric(block, 8)
    signed = [c - 128 for c in codes]
    return struct.pack("<e32b", d, *signed), [c * d for c in signed]


_BLOCKS: dict[str, Callable[[np.ndarray], Encoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def encode(array: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """Bytes of a tensor and the float32 weights that they stand for."""
    if kind in _PLAIN:
        stored = array.astype(_PLAIN[kind])
        return stored.tobytes(), stored.astype(np.float32)
    pieces = [_BLOCKS[kind](block) for block in array.reshape(-1, 32)]
    values = np.asarray([value for _, value in pieces], np.float64).astype(np.float32)
    return b"".join(data for data, _ in pieces), values.reshape(array.shape)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: the two halves of each head interleaved."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A typed metadata value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(item) for item in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[bytes, tuple[int, ...], str | int]],
    *,
    version: int = 3,
) -> Path:
    """Writes a file; ``tensors`` maps GGUF names to (bytes, shape outermost first, type name or id)."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    offset, body = 0, b""
    for name, (data, shape, kind) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", TYPE_IDS[kind] if isinstance(kind, str) else kind, offset)
        body += data + b"\0" * (-len(data) % 32)
        offset = len(body)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 40}


def llama_metadata(arch: str = "llama", **extra: Any) -> dict[str, Any]:
    """Metadata of a tiny decoder of ``SIZES``."""
    keys = {
        "block_count": SIZES["layers"],
        "context_length": 128,
        "embedding_length": SIZES["hidden"],
        "feed_forward_length": SIZES["ffn"],
        "attention.head_count": SIZES["heads"],
        "attention.head_count_kv": SIZES["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}, **extra}


def tiny_weights(arch: str = "llama", seed: int = 0, tied: bool = False) -> dict[str, np.ndarray]:
    """Random weights of a tiny decoder: Hugging Face name -> float32 array."""
    rng = np.random.default_rng(seed)
    d, q = SIZES["hidden"], SIZES["heads"] * SIZES["head_dim"]
    kv, ff = SIZES["kv_heads"] * SIZES["head_dim"], SIZES["ffn"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (SIZES["vocab"], d), "model.norm": (d,)}
    if not tied:
        shapes["lm_head"] = (SIZES["vocab"], d)
    for i in range(SIZES["layers"]):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (ff, d),
            "mlp.up_proj": (ff, d),
            "mlp.down_proj": (d, ff),
        }
        if arch == "qwen3":
            layer |= {"self_attn.q_norm": (SIZES["head_dim"],), "self_attn.k_norm": (SIZES["head_dim"],)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def write_tiny(
    path: Path, kind: str = "F32", *, arch: str = "llama", tied: bool = False, **extra: Any
) -> dict[str, np.ndarray]:
    """Writes a tiny decoder with matrices of type ``kind``; returns the weights a reader must find."""
    tensors, expected = {}, {}
    for name, value in tiny_weights(arch, tied=tied).items():
        stored = value
        if arch == "llama" and "q_proj" in name:
            stored = permute(value, SIZES["heads"])
        if arch == "llama" and "k_proj" in name:
            stored = permute(value, SIZES["kv_heads"])
        used = kind if value.ndim == 2 else "F32"
        tensors[gguf_name(name)] = (encode(stored, used)[0], value.shape, used)
        expected[name] = encode(value, used)[1]  # blocks lie within rows, so the order of rows is no matter
    write_gguf(path, llama_metadata(arch, **extra), tensors)
    return expected
