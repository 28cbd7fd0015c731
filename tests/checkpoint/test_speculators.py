"""The layout of vllm-project/speculators: read as published, written so that readers meet the right rows."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint import SafetensorsSource, save
from dspark_jax.checkpoint.deepspec import read_deepspec, write_deepspec
from dspark_jax.checkpoint.drafter_files import DrafterPieces, TargetView
from dspark_jax.checkpoint.speculators import read_speculators, write_speculators
from dspark_jax.drafters import drafter_specs
from dspark_jax.load import load_drafter
from tests.checkpoint.drafter_cases import (
    BACKBONE,
    HIDDEN,
    KINDS,
    VOCAB,
    Case,
    case,
    edit_config,
    same_array,
    same_tree,
    target,
    target_view,
)


def write(directory: Path, c: Case, **options: Any) -> Path:
    head = c.head if c.config.trimmed else None
    return write_speculators(directory, c.config, c.params, c.specs, d2t=c.d2t, **{"head": head, **options})


def read(directory: Path, view: TargetView | None = None) -> DrafterPieces:
    return read_speculators(directory, drafter_specs, target=view)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("trimmed", "permuted")])
def test_a_whole_vocabulary_is_written_and_read_back_equal(tmp_path: Path, kind: str) -> None:
    c, view = case(kind), target_view()
    write(tmp_path, c)
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} & set(SafetensorsSource(tmp_path).names())
    pieces = read(tmp_path, view)
    lost = {"num_target_layers": 0, "block_widths": ()}  # that layout has no place for them
    assert pieces.config == dataclasses.replace(c.config, **lost)
    assert same_tree(pieces.params, c.params)
    assert pieces.embed is view.embed and pieces.head is view.head and pieces.d2t is None


@pytest.mark.parametrize("kind", ["trimmed", "permuted"])
def test_a_draft_vocabulary_is_written_in_ascending_order_and_stays_the_same_drafter(tmp_path: Path, kind: str) -> None:
    """speculators cuts head rows out by the mask t2d, in ascending order; others would be wrong rows."""
    c, view = case(kind), target_view()
    assert c.d2t is not None and (np.diff(c.d2t) < 0).any()
    write(tmp_path, c)
    pieces = read(tmp_path, view)
    w2 = np.asarray(c.params["markov"]["w2"])
    ids = np.arange(VOCAB) if pieces.d2t is None else pieces.d2t
    assert (pieces.d2t is None) == (kind == "permuted") and (np.diff(ids) > 0).all()
    for row, token in enumerate(ids):  # each target id has the head and W2 row that it had before
        old = int(np.flatnonzero(c.d2t == token)[0])
        assert same_array(np.asarray(pieces.head)[row], c.head[old])
        assert same_array(np.asarray(pieces.params["markov"]["w2"])[row], w2[old])
    assert same_array(pieces.params["markov"]["w1"], c.params["markov"]["w1"])
    if kind == "trimmed":
        source = SafetensorsSource(tmp_path)
        assert (np.flatnonzero(source.read("t2d")) == np.arange(12) + source.read("d2t")).all()


def test_the_config_has_the_keys_its_readers_ask_for(tmp_path: Path) -> None:
    c = case("trimmed")
    write(tmp_path, c, verifier="some/target", verifier_architectures=["Qwen3ForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
    assert config["aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert (config["block_size"], config["sample_from_anchor"]) == (7, True)
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["mask_token_id"]) == (
        12,
        HIDDEN,
        39,
    )
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    spec = config["speculators_config"]
    assert spec["algorithm"] == "dspark" and spec["proposal_methods"][0]["speculative_tokens"] == 7
    assert spec["verifier"] == {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"}
    write(tmp_path, case("fill-in"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["block_size"], config["sample_from_anchor"]) == (7, False)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6
    write(tmp_path, case("dflash"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash" and "markov_rank" not in config
    assert read(tmp_path).config.sample_from_anchor  # written, so dflash's other default does not apply


def published(tmp_path: Path, **changes: Any) -> Case:
    """A directory as speculators' exporter writes it, frozen copies of the verifier included."""
    c = case("trimmed")
    write_deepspec(tmp_path, c.config, c.params, c.specs, d2t=c.d2t, head=c.head)
    source = SafetensorsSource(tmp_path)
    tensors = {name: source.read(name).copy() for name in source.names()}
    tensors["verifier_norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["verifier_lm_head.weight"] = c.head
    save(tmp_path / "model.safetensors", tensors)
    config = {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [0, 2, 4],
        "block_size": 7,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 12,
        "dtype": "float32",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 4,
        "mask_token_id": 39,
        "max_anchors": 3072,
        "model_type": "speculator_model",
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 7,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"},
        },
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": copy.deepcopy(BACKBONE),
        "transformers_version": "5.10.2",
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return c


def test_a_published_directory_loads_by_name_alone(tmp_path: Path) -> None:
    c = published(tmp_path)
    drafter = load_drafter(tmp_path, target())
    assert drafter.taps == (-1, 1, 3) and drafter.block_size == 7 and drafter.config.method == "dspark"
    assert drafter.d2t is not None and (np.asarray(drafter.d2t) == c.d2t).all()
    assert same_tree(read(tmp_path).params, c.params) and same_array(drafter.shared.head, c.head)


def test_the_fill_in_layout_drafts_one_token_less(tmp_path: Path) -> None:
    published(tmp_path, sample_from_anchor=False)
    config = load_drafter(tmp_path, target()).config
    assert (config.block_size, config.block_width(6), config.sample_from_anchor) == (6, 7, False)


def test_maps_are_checked_here_too(tmp_path: Path) -> None:
    published(tmp_path)
    source = SafetensorsSource(tmp_path)
    tensors = {name: source.read(name).copy() for name in source.names()}
    save(tmp_path / "model.safetensors", {name: value for name, value in tensors.items() if name != "d2t"})
    with pytest.raises(ValueError, match="needs the tensor d2t"):
        read(tmp_path)


def test_each_reader_refuses_the_other_layout(tmp_path: Path) -> None:
    c = case()
    write(tmp_path / "a", c)
    with pytest.raises(ValueError, match="speculators layout, expected DeepSpec's"):
        read_deepspec(tmp_path / "a", drafter_specs)
    write_deepspec(tmp_path / "b", c.config, c.params, c.specs)
    with pytest.raises(ValueError, match="expected speculators' layout"):
        read(tmp_path / "b")


def test_a_trimmed_drafter_is_not_written_without_its_head_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs its d2t and head rows"):
        write(tmp_path, case("trimmed"), head=None)
    assert not list(tmp_path.iterdir())


def test_a_drafter_for_other_layers_is_refused(tmp_path: Path) -> None:
    """speculators allows the last hidden state, the normalised one; its index is the number of layers."""
    write(tmp_path, case())
    edit_config(tmp_path, aux_hidden_state_layer_ids=[0, 2, 5])
    with pytest.raises(ValueError, match="target_layer_ids has 4, the last decoder layer"):
        read(tmp_path, target_view())


def test_bfloat16_is_kept(tmp_path: Path) -> None:
    c = case("trimmed", jnp.bfloat16)
    write(tmp_path, c)
    assert same_array(read(tmp_path).params["fc"], c.params["fc"])
