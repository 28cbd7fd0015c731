"""The published drafter of Qwen3-8B at its real shapes, in a file of holes: names and shapes, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.drafter_files import inspect_drafter
from dspark_jax.drafters import drafter_specs
from dspark_jax.params import count, spec_leaves

# --- the published size -------------------------------------------------------------------------------------

# deepseek-ai/dspark_qwen3_8b_block7: five of Qwen3-8B's layers, five taps, rank 256, 4.74 GB in bfloat16.
QWEN3_8B_BLOCK7: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "bos_token_id": 151643,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "transformers_version": "5.10.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of that checkpoint, written out by hand from its classes."""
    d, ff, kv, r, v = 4096, 12288, 8 * 128, 256, 151936
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (v, d),
        "lm_head.weight": (v, d),
        "fc.weight": (d, 5 * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
        "markov_head.markov_w1.weight": (v, r),
        "markov_head.markov_w2.weight": (v, r),
        "confidence_head.proj.weight": (1, d + r),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(5):
        layer = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "self_attn.q_proj": (32 * 128, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, 32 * 128),
            "mlp.gate_proj": (ff, d),
            "mlp.up_proj": (ff, d),
            "mlp.down_proj": (d, ff),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A bfloat16 safetensors file whose data is a hole on the disk. Returns the bytes of its data."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return offset


@pytest.mark.parametrize("sharded", [False, True])
def test_a_directory_of_the_published_8b_drafter_fits_abstractly(tmp_path: Path, sharded: bool) -> None:
    """deepseek-ai/dspark_qwen3_8b_block7 at its real shapes, without its 4.74 GB: every tensor is matched."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B_BLOCK7))
    shapes = published_shapes()
    if sharded:
        names = list(shapes)
        parts = {
            "model-00001-of-00002.safetensors": names[::2],
            "model-00002-of-00002.safetensors": names[1::2],
        }
        size = sum(write_sparse(tmp_path / f, {n: shapes[n] for n in part}) for f, part in parts.items())
        weight_map = {n: f for f, part in parts.items() for n in part}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        size = write_sparse(tmp_path / "model.safetensors", shapes)
    assert 4.73e9 < size < 4.75e9  # the size the hub shows
    config, tree = inspect_drafter(tmp_path, drafter_specs, dtype=jnp.bfloat16)
    assert (config.block_size, config.mask_token_id, config.markov_rank) == (7, 151669, 256)
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.sample_from_anchor
    leaves = jax.tree.leaves(tree)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    specs = drafter_specs(config)
    assert {s.name: s.shape for s in spec_leaves(specs)} == {
        name: shape for name, shape in shapes.items() if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    assert 2 * (count(specs) + 2 * 151936 * 4096) == size


def test_a_wrong_shape_of_the_published_drafter_is_found_abstractly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B_BLOCK7, "num_hidden_layers": 6, "layer_types": None}))
    write_sparse(tmp_path / "model.safetensors", {**published_shapes(), "fc.weight": (4096, 4 * 4096)})
    with pytest.raises(ValueError, match=r"(?s)layers.5.input_layernorm.*fc.weight is \(4096, 16384\)"):
        inspect_drafter(tmp_path, drafter_specs)
