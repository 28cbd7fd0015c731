"""A block drafter's trained window is honoured in the context and inside the block, however its config spells it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_drafter
from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import drafter_specs
from dspark_jax.layout import dense_layout
from dspark_jax.params import init
from dspark_jax.targets import Target
from dspark_jax.testing import tiny_target
from tests.drafters.reference import block_states

CONTEXT, WIDTH, ANCHOR = 9, 4, 6
SPELLINGS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "layer_types": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True},
        (3, 0),
    ),
    "use_sliding_window": ({"use_sliding_window": True, "sliding_window": 3, "layer_types": None}, (3, 3)),
    "max_window_layers": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
        (0, 5),
    ),
    "no window": ({"use_sliding_window": False, "sliding_window": 3, "layer_types": None}, (0, 0)),
}


@pytest.fixture(autouse=True)
def _float64(x64: None) -> None:
    """Equality to 1e-9."""


def written(directory: Path, target: Target, changes: dict[str, Any]) -> Any:
    """A DFlash checkpoint of two layers whose config says ``changes`` of the window; returns its parameters."""
    decoder = target.config
    config = DrafterConfig(
        "dflash",
        dataclasses.replace(decoder, layers=decoder.layers[:2], tie_embeddings=False),
        block_size=WIDTH,
        target_layer_ids=(0, 1),
        mask_token_id=decoder.vocab_size - 1,
        num_target_layers=decoder.num_layers,
    )
    params = init(drafter_specs(config), jax.random.key(4), jnp.float64)
    write_deepspec(directory, config, params, drafter_specs(config))
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), "max_window_layers": None, **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return params


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_loaded_drafters_block_sees_what_the_window_allows(tmp_path: Path, spelling: str) -> None:
    """States equal a NumPy model's: slot k sees positions above its own minus the window, context and block alike."""
    changes, windows = SPELLINGS[spelling]
    target = tiny_target(dtype=jnp.float64)
    params = written(tmp_path, target, changes)
    drafter: Any = load_drafter(tmp_path, target)
    assert tuple(layer.window for layer in drafter.config.decoder.layers) == windows
    features = np.random.default_rng(2).normal(size=(CONTEXT, 2 * target.config.hidden_size))
    layout = dense_layout(jnp.zeros(1, jnp.int32), jnp.array([CONTEXT]), CONTEXT)
    with jax.disable_jit():
        state = drafter.absorb(
            drafter.init(1, CONTEXT + WIDTH), jnp.asarray(features), layout, jnp.zeros(CONTEXT, jnp.int32), layout.count
        )
        got = drafter.hidden(state, jnp.array([ANCHOR]), jnp.array([CONTEXT]), WIDTH)[0]
    expected = block_states(drafter.config, params, drafter.shared.embed, features, ANCHOR, WIDTH)
    np.testing.assert_allclose(got, expected, atol=1e-9, rtol=1e-9)
