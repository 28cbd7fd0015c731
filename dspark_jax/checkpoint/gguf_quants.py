"""Decoders of GGUF's tensor types, in numpy. A quantised tensor is a run of blocks of 32 (or 256) weights.

Own decoders: F64, F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. The others go through the package ``gguf``
where it is installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

_CHUNK = 8192  # blocks decoded at a time: 1 MB of float32, which stays in the cache over the passes of a decoder

Decoder = Callable[[np.ndarray, np.ndarray], None]
"""(blocks [n, block_bytes] uint8, out [n, block_weights] float32), filling ``out``."""


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte ``at`` of every block, as float32 ``[n, 1]``."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Weights 0..15 of a block are the low nibbles of its 16 bytes, weights 16..31 the high ones."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bit(blocks: np.ndarray, at: int, out: np.ndarray) -> None:
    """Adds 16 where bit i of the 32-bit word at byte ``at`` is set for weight i."""
    out += np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.float32(16)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:18], out)
    out -= 8
    out *= _scale(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:20], out)
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 6:22], out)
    _fifth_bit(blocks, 2, out)
    out -= 16
    out *= _scale(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 8:24], out)
    _fifth_bit(blocks, 4, out)
    out *= _scale(blocks, 0)
    out += _scale(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:34].view(np.int8)
    out *= _scale(blocks, 0)


@dataclasses.dataclass(frozen=True)
class QuantType:
    """A tensor type: ``block_weights`` weights take ``block_bytes`` bytes.

    ``plain`` is the numpy dtype of an unquantised type; ``decode`` our decoder of a quantised one.
    """

    name: str
    block_weights: int
    block_bytes: int
    plain: Any = None
    decode: Decoder | None = None


QUANT_TYPES: dict[int, QuantType] = {
    0: QuantType("F32", 1, 4, plain="<f4"),
    1: QuantType("F16", 1, 2, plain="<f2"),
    2: QuantType("Q4_0", 32, 18, decode=_q4_0),
    3: QuantType("Q4_1", 32, 20, decode=_q4_1),
    6: QuantType("Q5_0", 32, 22, decode=_q5_0),
    7: QuantType("Q5_1", 32, 24, decode=_q5_1),
    8: QuantType("Q8_0", 32, 34, decode=_q8_0),
    9: QuantType("Q8_1", 32, 40),
    10: QuantType("Q2_K", 256, 84),
    11: QuantType("Q3_K", 256, 110),
    12: QuantType("Q4_K", 256, 144),
    13: QuantType("Q5_K", 256, 176),
    14: QuantType("Q6_K", 256, 210),
    15: QuantType("Q8_K", 256, 292),
    16: QuantType("IQ2_XXS", 256, 66),
    17: QuantType("IQ2_XS", 256, 74),
    18: QuantType("IQ3_XXS", 256, 98),
    19: QuantType("IQ1_S", 256, 50),
    20: QuantType("IQ4_NL", 32, 18),
    21: QuantType("IQ3_S", 256, 110),
    22: QuantType("IQ2_S", 256, 82),
    23: QuantType("IQ4_XS", 256, 136),
    28: QuantType("F64", 1, 8, plain="<f8"),
    29: QuantType("IQ1_M", 256, 56),
    30: QuantType("BF16", 1, 2, plain=ml_dtypes.bfloat16),
    34: QuantType("TQ1_0", 256, 54),
    35: QuantType("TQ2_0", 256, 66),
    39: QuantType("MXFP4", 32, 17),
}


def decode(raw: np.ndarray, type_id: int, where: str) -> np.ndarray:
    """Weights of a run of blocks.

    Args:
        raw: ``[blocks * block_bytes]`` uint8, contiguous.
        type_id: key of ``QUANT_TYPES``.
        where: file and tensor, for errors.

    Returns:
        ``[blocks * block_weights]``: float32, or a view of ``raw`` in the dtype of an unquantised type.

    Raises:
        ValueError: a type without a decoder of ours while the package ``gguf`` is not installed, or one that
            it does not know either.
    """
    kind = QUANT_TYPES[type_id]
    if kind.plain is not None:
        return raw.view(kind.plain)
    if kind.decode is None:
        return _decode_with_package(raw, type_id, kind, where)
    blocks = raw.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_weights), np.float32)
    for i in range(0, len(blocks), _CHUNK):
        kind.decode(blocks[i : i + _CHUNK], out[i : i + _CHUNK])
    return out.reshape(-1)


def _decode_with_package(raw: np.ndarray, type_id: int, kind: QuantType, where: str) -> np.ndarray:
    if importlib.util.find_spec("gguf") is None:
        own = ", ".join(t.name for t in QUANT_TYPES.values() if t.plain is not None or t.decode is not None)
        raise ValueError(
            f"{where} is quantised as {kind.name}, which needs the package gguf: pip install gguf (without it: {own})"
        )
    import gguf  # not at the top: it is optional and slow to import

    try:
        blocks = raw.reshape(-1, kind.block_bytes)
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type_id)).reshape(-1)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ValueError(
            f"{where} is quantised as {kind.name}, which the installed gguf does not decode: {error!r}"
        ) from None
