"""Random tiny Gemma 4 models in float64: drafting changes no token, and transformers computes the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.config import DrafterConfig
from dspark_jax.config_io import decoder_config_from_hf
from dspark_jax.drafter_io import drafter_config_from_hf
from dspark_jax.drafters.dspark import Drafter, drafter_specs
from dspark_jax.layout import dense_layout
from dspark_jax.params import init
from dspark_jax.targets import Target, decoder_specs

VOCAB, HIDDEN, WINDOW = 32, 16, 4
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 4,
    "global_head_dim": 8,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
DRAFTER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "block_size": 4,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": [-1, 0, 2],
    "markov_rank": HIDDEN,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def shaken(params: Any, seed: int, branches: float = 0.5) -> Any:
    """Norms and layer scalars away from one, so that leaving one out shows. The norms behind the branches are small:
    the model is then mostly a bigram one, which a Markov head can draft for."""
    rng = np.random.default_rng(seed)

    def shake(path: Any, value: jax.Array) -> jax.Array:
        name = str(getattr(path[-1], "key", ""))
        if value.ndim > 1 or "bias" in name:
            return value
        small = branches if name in ("post_attention_layernorm", "post_feedforward_layernorm") else 1.0
        return value * small * jnp.asarray(rng.uniform(0.6, 1.4, value.shape), value.dtype)

    return jax.tree_util.tree_map_with_path(shake, params)


def tiny() -> tuple[Target, Drafter]:
    """A target of two sliding and two full layers, and a drafter that is right about half of the time."""
    config = decoder_config_from_hf(TEXT, source="tiny")
    params = shaken(init(decoder_specs(config), jax.random.key(0), jnp.float64), 0)
    params["embed_tokens"], params["lm_head"] = params["embed_tokens"] * 50.0, params["lm_head"] * 50.0
    draft: DrafterConfig = drafter_config_from_hf({**TEXT, **DRAFTER}, source="tiny drafter")
    weights = shaken(init(drafter_specs(draft), jax.random.key(1), jnp.float64), 1)
    weights["markov"] = {"w1": params["embed_tokens"], "w2": params["lm_head"]}
    drafter = Drafter.build(weights, draft, embed=params["embed_tokens"], head=params["lm_head"])
    return Target.build(params, config), drafter


@pytest.mark.slow
def test_drafting_changes_no_token_of_sampled_text(x64: None) -> None:
    """Two prompts, one shorter and one longer than the window; every round rolls the caches back. (Greedy text is the
    oracle's matter.)"""
    target, drafter = tiny()
    prompts = jnp.asarray([[3, 14, 15, 9, 2, 6, 5, 30, 8], [27, 18, 0, 0, 0, 0, 0, 0, 0]], jnp.int32)
    seeds = jnp.asarray([5, 6], jnp.uint32)
    plain, drafted = (
        dspark_jax.generate(
            target, d, prompts, jnp.asarray([9, 2]), seeds=seeds, max_new_tokens=32, verification="coupled"
        )
        for d in (None, drafter)
    )
    assert drafted.tokens.tolist() == plain.tokens.tolist()
    share = float((drafted.committed - (drafted.committed > 0)).sum() / drafted.offered.sum())
    assert 0.1 < share < 0.9, share


def test_a_step_at_a_time_equals_one_forward(x64: None) -> None:
    """Masks of both kinds of layers come from positions, not from how a text was cut into forwards."""
    target, _ = tiny()
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, 13), jnp.int32)

    @jax.jit
    def run(target: Target, piece: jax.Array, start: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        layout = dense_layout(start[None], jnp.asarray([len(piece)]), len(piece))
        hidden, _, cache = target.forward(piece, layout, cache)
        return hidden, cache

    def states(pieces: list[int]) -> np.ndarray:
        cache, start, out = target.init_cache(1, 32), 0, []
        for size in pieces:
            hidden, cache = run(target, tokens[start : start + size], jnp.asarray(start), cache)
            out.append(np.asarray(hidden))
            start += size
        return np.concatenate(out)

    np.testing.assert_allclose(states([6, 1, 1, 5]), states([13]), atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_k_eq_v": False, "attention_bias": True},
        {"attention_bias": True, "final_logit_softcapping": None, "tie_word_embeddings": True},
        {"model_type": "gemma4_unified_text", "rms_norm_eps": 1e-2},
    ],
)
def test_transformers_computes_the_same_logits(changes: dict[str, Any], tmp_path: Path, x64: None) -> None:
    """A random model saved by transformers, read back from its files, past the window."""
    torch = pytest.importorskip("torch")
    import transformers

    raw = {**TEXT, **changes}
    if raw["model_type"] != "gemma4_text":
        raw.pop("hidden_size_per_layer_input")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.ndim == 1 and ("norm" in name or "layer_scalar" in name or "bias" in name):
                value.uniform_(0.6, 1.4)
            elif value.ndim > 1:
                value.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path)
    target = dspark_jax.load_target(tmp_path, dtype="float64")
    ids = np.random.default_rng(1).integers(0, VOCAB, 11)
    layout = dense_layout(jnp.asarray([0]), jnp.asarray([11]), 11)
    hidden, _, _ = target.forward(jnp.asarray(ids), layout, target.init_cache(1, 16))
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None]), use_cache=False).logits[0].numpy()
    # Its rotary angles and norms are made in float32.
    np.testing.assert_allclose(np.asarray(target.unembed(hidden)), theirs, atol=1e-5)
