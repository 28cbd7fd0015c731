"""EAGLE-3 drafts what its definition says, in every layout of norms, and never changes the target's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_drafter
from dspark_jax.checkpoint import save
from dspark_jax.checkpoint.deepspec import drafter_tensors
from dspark_jax.config import Eagle3Norms
from dspark_jax.drafters import Eagle3Drafter, drafter_specs
from dspark_jax.layout import dense_layout
from dspark_jax.targets import Target
from dspark_jax.testing import tiny_target
from tests.drafters.chain_cases import SWITCHES, Argmax, Tiny, texts_by_block_length, tiny_chain
from tests.drafters.chain_checks import CELLS, absorbed, check_against_definition


@pytest.fixture(autouse=True)
def _float64(x64: None) -> None:
    """Token-exact claims are made in float64."""


@pytest.mark.parametrize("switches", SWITCHES)
def test_drafts_equal_an_independent_model_under_every_norm_switch(switches: str) -> None:
    target = tiny_target(dtype=jnp.float64)
    check_against_definition(tiny_chain(target, "eagle3", norms=SWITCHES[switches]))


def test_a_window_a_trimmed_vocabulary_and_a_llama_layer_are_honoured() -> None:
    target = tiny_target("llama", dtype=jnp.float64)
    check_against_definition(tiny_chain(target, "eagle3", window=3, trimmed=11))


def test_text_is_that_of_plain_decoding_whatever_the_block_length() -> None:
    """Greedy and coupled rows, blocks of 0 to 5 drafts; and the drafts are good for something."""
    target = tiny_target(dtype=jnp.float64)
    texts, committed = texts_by_block_length(target, tiny_chain(target, "eagle3").drafter)
    np.testing.assert_array_equal(texts, np.broadcast_to(texts[:, :1], texts.shape))
    assert (committed[:, 0] == 1).all() and (committed[:, 5] > 1.5).all()


def test_a_shorter_chain_is_the_beginning_of_a_longer_one() -> None:
    drafter: Any = tiny_chain(tiny_target(dtype=jnp.float64), "eagle3").drafter
    with jax.disable_jit():
        state, features, tokens = absorbed(drafter)
        anchor = jnp.asarray([0, *(t[-1] for t in tokens)], jnp.int32)
        length = jnp.asarray([0, *(len(f) for f in features)], jnp.int32)
        long, short = (drafter.propose(state, anchor, length, k, Argmax(None)) for k in (4, 1))
    np.testing.assert_array_equal(long.tokens[1:, :1], short.tokens[1:])
    np.testing.assert_allclose(long.base[:1, 1:], short.base[:, 1:], atol=1e-12)


def test_what_lies_past_the_length_is_never_read() -> None:
    """Rejected pairs, slots at work elsewhere and cells beyond the context may hold anything."""
    drafter: Any = tiny_chain(tiny_target(dtype=jnp.float64), "eagle3").drafter
    with jax.disable_jit():
        state, features, tokens = absorbed(drafter)
        anchor = jnp.asarray([0, *(t[-1] for t in tokens)], jnp.int32)
        length = jnp.asarray([0, *(len(f) for f in features)], jnp.int32)
        clean = drafter.propose(state, anchor, length, 2, Argmax(None))
        cell = jnp.arange(CELLS)[None, None, :, None]
        stale = (cell >= length[:, None, None, None]) | (cell == 0)
        poison = jax.tree.map(lambda a: jnp.where(stale, 1e6, a), state.cache)
        again = drafter.propose(state.replace(cache=poison), anchor, length, 2, Argmax(None))
    np.testing.assert_array_equal(clean.base[:, 1:], again.base[:, 1:])


def test_nan_of_the_slots_last_tenant_reaches_nobody() -> None:
    """A masked value is multiplied by 0, which is no help against NaN: none may be stored, and the state that waited
    for its partner only ever meets cell 0, which nobody reads."""
    drafter: Any = tiny_chain(tiny_target(dtype=jnp.float64), "eagle3").drafter
    features = jax.random.normal(jax.random.key(3), (6, len(drafter.taps) * drafter.config.decoder.hidden_size))
    tokens, six = jnp.arange(6, dtype=jnp.int32), dense_layout(jnp.zeros(1, jnp.int32), jnp.array([6]), 6)
    three = dense_layout(jnp.zeros(1, jnp.int32), jnp.array([3]), 3)
    with jax.disable_jit():
        clean = drafter.init(1, CELLS)
        dirty = drafter.absorb(clean, features * jnp.nan, six, tokens, six.count)
        assert np.isnan(dirty.hidden).all() and np.isfinite(dirty.cache.v[0]).all()
        states = [drafter.absorb(s, features[:3], three, tokens[:3], three.count) for s in (clean, dirty)]
        blocks = [drafter.propose(s, jnp.array([4]), jnp.array([3]), 2, Argmax(None)) for s in states]
    assert np.isfinite(blocks[0].base).all()
    np.testing.assert_array_equal(blocks[0].base, blocks[1].base)


# ---- the layout of speculators, as published for Qwen3-8B: a Llama layer, null layer ids, offsets in d2t ------------


def published(directory: Path, target: Target, **changes: Any) -> Tiny:
    """Writes a checkpoint by hand, in the spelling of RedHatAI/Qwen3-8B-speculator.eagle3; returns the drafter."""
    tiny = tiny_chain(target, "eagle3", taps=(1, 3, 4), trimmed=12, norms=Eagle3Norms(before_residual=True))
    config, decoder = tiny.drafter.config, target.config
    shared, head = tiny.drafter.shared, tiny.drafter.shared.head
    directory.mkdir(parents=True, exist_ok=True)
    tensors = drafter_tensors(config, tiny.params, drafter_specs(config), d2t=shared.d2t, head=head)
    save(directory / "model.safetensors", tensors)
    raw: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 12,
        "eagle_aux_hidden_state_layer_ids": None,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformer_layer_config": {
            "attention_bias": False,
            "head_dim": decoder.layers[0].head_dim,
            "hidden_act": "silu",
            "hidden_size": decoder.hidden_size,
            "intermediate_size": decoder.intermediate_size,
            "max_position_embeddings": 256,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": decoder.num_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": decoder.layers[0].num_kv_heads,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_cache": True,
            "vocab_size": decoder.vocab_size,
        },
    }
    (directory / "config.json").write_text(json.dumps({**raw, **changes}))
    return tiny


def test_a_published_speculators_checkpoint_drafts_as_its_definition_says(tmp_path: Path) -> None:
    """The null layer ids are (2, n / 2, n - 3) of the hidden states: outputs of layers 1, 3 and 4 of eight."""
    target = tiny_target("llama", num_layers=8, dtype=jnp.float64)
    tiny = published(tmp_path, target)
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, Eagle3Drafter) and drafter.block_size == 5 and drafter.max_drafts is None
    assert drafter.taps == (1, 3, 4) and drafter.config.norms == Eagle3Norms(before_residual=True)
    check_against_definition(Tiny(drafter, tiny.params))
