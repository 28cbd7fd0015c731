"""The families: what each ``model_type`` fixes, leaves out and spells in its own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The layer types of ``config.json``."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How one ``model_type`` spells a decoder.

    Attributes:
        architecture: the class name written to ``architectures``.
        defaults: what transformers assumes for keys that a config.json leaves out.
        fixed: fields of DecoderConfig that the family decides.
        has_mlp_bias: the ``mlp_bias`` key is honoured (elsewhere transformers ignores it).
        has_windows: sliding-window layers are honoured.
        activation_key: where the activation is named.
        two_kinds: full and sliding layers have head sizes, key/value heads and rotary positions of their own.
        full_every: where ``layer_types`` is absent, every n-th layer and the last one are full; 0: all are.
        scaled_embedding: the embedding output is multiplied by the square root of the hidden size.
        has_softcap: ``final_logit_softcapping`` is honoured.
        harmless: keys of ``read.UNSUPPORTED`` that ask for nothing in this family.
    """

    architecture: str
    defaults: Json
    fixed: Json
    has_mlp_bias: bool = False
    has_windows: bool = False
    activation_key: str = "hidden_act"
    two_kinds: bool = False
    full_every: int = 0
    scaled_embedding: bool = False
    has_softcap: bool = False
    harmless: tuple[str, ...] = ()


def _gemma4(architecture: str, **defaults: Any) -> Family:
    """Gemma 4's text decoder, dense; the classes that use it differ in a few defaults."""
    return Family(
        architecture,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_activation": "gelu_pytorch_tanh",
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            },
            **defaults,
        },
        fixed={
            "qk_norm": True,
            "v_norm": True,
            "sandwich_norm": True,
            "layer_scalar": True,
            "attention_scale": 1.0,
        },
        has_windows=True,
        activation_key="hidden_activation",
        two_kinds=True,
        full_every=6,
        scaled_embedding=True,
        has_softcap=True,
        harmless=("num_experts",),  # a dense drafter copies it from its target; enable_moe_block decides
    )


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        fixed={},
        has_mlp_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        fixed={"qk_norm": True},
        has_windows=True,
    ),
    "gemma4_text": _gemma4(
        "Gemma4ForCausalLM",
        max_position_embeddings=131072,
        sliding_window=512,
        hidden_size_per_layer_input=256,
    ),
    "gemma4_unified_text": _gemma4("Gemma4UnifiedForCausalLM", max_position_embeddings=262144, sliding_window=1024),
}
