"""The embedded target as a transformers model in torch, for comparisons (extra ``torch``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_jax.checkpoint.gguf import GGUFSource, decoder_config_from_gguf
from dspark_jax.targets.embedded import find_embedded


def torch_llama(name: str) -> Any:
    """transformers' Llama in float32 on the very weights that ``load_target(name)`` dequantises.

    Raises ImportError where torch is missing, FileNotFoundError where the model's package is.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = GGUFSource(find_embedded(name))
    c = decoder_config_from_gguf(source)
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.layers[0].num_kv_heads,
        head_dim=c.layers[0].head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.layers[0].rope.theta},
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tie_embeddings,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_ids[0],
        pad_token_id=c.eos_token_ids[0],
    )
    state = {name: torch.from_numpy(np.array(source.read(name), np.float32)) for name in source.names()}
    if c.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model
