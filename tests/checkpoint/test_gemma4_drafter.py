"""Gemma 4 drafters on disk: what their configs mean, what is refused, and writing them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint.deepspec import read_deepspec, write_deepspec
from dspark_jax.config import LayerConfig, RopeConfig
from dspark_jax.drafter_io import drafter_config_to_hf
from dspark_jax.drafters import drafter_specs
from tests.checkpoint.drafter_cases import read
from tests.oracle import oracle_dir


def gemma4_drafter(**changes: Any) -> dict[str, Any]:
    """The reference's drafter config with some keys changed; None removes a key."""
    raw = json.loads((oracle_dir() / "gemma4_dspark" / "draft" / "config.json").read_text())
    return {key: value for key, value in {**raw, **changes}.items() if value is not None}


def test_a_gemma4_drafter_has_full_layers_of_the_global_shape() -> None:
    """The stray ``rope_type`` and ``rope_theta`` in ``rope_parameters`` say nothing."""
    config = read(gemma4_drafter())
    rope = RopeConfig("proportional", 1e6, partial_rotary_factor=0.25)
    assert config.decoder.layers == (LayerConfig(1, 32, rope, 0, True),) * 2
    assert (config.logit_softcap, config.decoder.embed_scale) == (30.0, 8.0)
    assert read(gemma4_drafter(layer_types=None)) == config
    own_values = read(gemma4_drafter(attention_k_eq_v=False))
    assert own_values.decoder.layers == (LayerConfig(2, 32, rope, 0, False),) * 2
    assert read(drafter_config_to_hf(own_values)) == own_values


def test_a_dense_gemma4_drafter_of_an_expert_target_is_accepted() -> None:
    """It copies the numbers of its target's experts."""
    assert read(gemma4_drafter(num_experts=8, top_k_experts=2, moe_intermediate_size=64)) == read(gemma4_drafter())


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "Gemma drafters with sliding layers"),
        ({"enable_moe_block": True}, "mixture-of-experts drafters"),
        ({"hidden_size_per_layer_input": 16}, "per-layer embeddings"),
        ({"num_kv_shared_layers": 1}, "keys and values shared between layers"),
        ({"use_double_wide_mlp": True}, "double-wide MLP"),
        ({"model_type": "gemma4_assistant"}, "Gemma drafters other than gemma4_text"),
    ],
)
def test_gemma4_drafters_that_cannot_run_are_refused_by_name(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        read(gemma4_drafter(**changes))


def test_a_gemma4_drafter_survives_writing_and_reading(tmp_path: Path) -> None:
    """Layer scalars, the norms behind the branches and the missing value projections included."""
    first = read_deepspec(oracle_dir() / "gemma4_dspark" / "draft", drafter_specs)
    specs = drafter_specs(first.config)
    write_deepspec(tmp_path, first.config, first.params, specs, embed=first.embed, head=first.head)
    again = read_deepspec(tmp_path, drafter_specs)
    assert again.config == first.config
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma4DSparkModel"]
    for mine, theirs in zip(jax.tree.leaves(again.params), jax.tree.leaves(first.params), strict=True):
        np.testing.assert_array_equal(mine, theirs)
