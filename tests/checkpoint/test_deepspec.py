"""DeepSpec directories: written and read back equal, shared with the target, stored as int8 rows."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax.checkpoint.deepspec as deepspec
from dspark_jax.checkpoint import SafetensorsSource
from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.checkpoint.drafter_files import TargetView, stored_dtype
from dspark_jax.checkpoint.int8_rows import dequantize_rows, quantize_rows
from dspark_jax.drafters import drafter_specs
from dspark_jax.load import load_drafter, load_target
from dspark_jax.params import spec_leaves
from tests.checkpoint.drafter_cases import (
    HIDDEN,
    KINDS,
    TARGET_LAYERS,
    VOCAB,
    case,
    edit_config,
    edit_tensors,
    same_array,
    same_tree,
    target_view,
)
from tests.checkpoint.drafter_cases import read_case as read
from tests.checkpoint.drafter_cases import write_case as write
from tests.oracle import oracle_dir

ORACLE = ("qwen3_dspark_vanilla", "qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_dflash")


# --- reading what DeepSpec writes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORACLE)
def test_checkpoints_of_the_reference_load_unchanged_and_share_the_targets_arrays(name: str) -> None:
    """Every tensor arrives bit for bit; its copies of embedding and head are the target's own arrays."""
    target = load_target(oracle_dir() / "targets" / "qwen3_tiny", dtype="float32")
    directory = oracle_dir() / name / "draft"
    drafter = load_drafter(directory, target)
    source = SafetensorsSource(directory)
    specs, params = drafter_specs(drafter.config), read(directory).params
    named = dict(zip([s.name for s in spec_leaves(specs)], jax.tree.leaves(params), strict=True))
    assert named.keys() | {"embed_tokens.weight", "lm_head.weight"} == set(source.names())
    for key, value in named.items():
        assert same_array(value, source.read(key)), key
    assert drafter.shared.embed is target.params["embed_tokens"]
    assert drafter.shared.head is target.params["lm_head"]
    assert drafter.d2t is None and drafter.taps == (0, 2, 4) and drafter.block_size == 7


def test_a_copy_that_differs_in_one_bit_stays_the_drafters_own(tmp_path: Path) -> None:
    c, view = case(), target_view()
    write(tmp_path, c, embed=c.embed, head=c.head)
    same = read(tmp_path, view)
    assert same.embed is view.embed and same.head is view.head
    other = c.embed.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], 9)
    edit_tensors(tmp_path, embed_tokens__weight=other)
    own = read(tmp_path, view)
    assert same_array(own.embed, other) and own.head is view.head


def test_copies_are_compared_in_the_dtype_they_are_used_in(tmp_path: Path) -> None:
    """A float32 checkpoint whose bfloat16 rounding is the target shares it."""
    view = target_view(dtype=jnp.bfloat16)
    c = case()
    write(tmp_path, c, embed=c.embed, head=c.head)
    assert read(tmp_path, view, dtype=jnp.bfloat16).embed is view.embed
    in_float32 = read(tmp_path, view, dtype=jnp.float32)
    assert in_float32.embed.dtype == jnp.float32 and same_array(in_float32.embed, c.embed)


@pytest.mark.parametrize("tied", [True, False])
def test_absent_copies_are_the_targets(tmp_path: Path, tied: bool) -> None:
    """FIELD: tied target, untied drafter, no copies at all: each combination loads."""
    view = target_view()
    if tied:
        view = TargetView(dataclasses.replace(view.config, tie_embeddings=True), view.embed, view.embed)
    write(tmp_path, case())
    pieces = read(tmp_path, view)
    assert pieces.embed is view.embed and pieces.head is view.head
    write(tmp_path, case("trimmed"))
    pieces = read(tmp_path, view)
    assert same_array(pieces.head, np.asarray(view.head)[pieces.d2t])
    alone = read(tmp_path)
    assert alone.embed is None and alone.head is None


def test_a_head_in_target_ids_gives_the_rows_that_d2t_lists(tmp_path: Path) -> None:
    c, view = case("trimmed"), target_view()
    write(tmp_path, c, head=c.head)
    own = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    edit_tensors(tmp_path, lm_head__weight=own)
    assert same_array(read(tmp_path, view).head, own[c.d2t])
    edit_tensors(tmp_path, lm_head__weight=own[:13])
    with pytest.raises(ValueError, match=r"lm_head.weight is \(13, 16\), expected \(12, 16\) in draft ids or"):
        read(tmp_path, view)


# --- writing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_equal(tmp_path: Path, kind: str, dtype: Any) -> None:
    c = case(kind, dtype)
    assert write(tmp_path / "new" / "drafter", c, embed=c.embed, head=c.head) == tmp_path / "new" / "drafter"
    pieces = read(tmp_path / "new" / "drafter")
    assert pieces.config == c.config
    assert same_tree(pieces.params, c.params)
    assert same_array(pieces.embed, c.embed) and same_array(pieces.head, c.head)
    assert (pieces.d2t is None) == (c.d2t is None)
    if c.d2t is not None and pieces.d2t is not None:
        assert same_array(pieces.d2t, c.d2t)
    assert {p.name for p in (tmp_path / "new" / "drafter").iterdir()} == {"config.json", "model.safetensors"}


def test_the_map_is_stored_as_offsets_with_a_mask(tmp_path: Path) -> None:
    """FIELD: target id = draft id + d2t[draft id]; t2d marks the target ids that are there."""
    c = case("trimmed")
    write(tmp_path, c)
    source = SafetensorsSource(tmp_path)
    offsets, mask = source.read("d2t"), source.read("t2d")
    assert offsets.dtype == np.int64 and mask.dtype == np.bool_
    assert (np.arange(12) + offsets == c.d2t).all()
    assert set(np.flatnonzero(mask)) == set(np.asarray(c.d2t).tolist()) and mask.shape == (VOCAB,)


def test_a_map_is_written_exactly_for_a_trimmed_vocabulary(tmp_path: Path) -> None:
    for c, d2t in ((case("trimmed"), None), (case(), np.arange(VOCAB))):
        with pytest.raises(ValueError, match="trimmed draft vocabulary is written with its d2t"):
            write_deepspec(tmp_path, c.config, c.params, c.specs, d2t=d2t)
    with pytest.raises(ValueError, match="maps 2 draft ids to target id 3"):
        c = case("trimmed")
        write_deepspec(tmp_path, c.config, c.params, c.specs, d2t=np.array([3, 3, *range(4, 14)]))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(40, 16\), expected \(12, 16\)"):
        write(tmp_path, c, head=c.embed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "trimmed"])
def test_int8_rows_are_read_back_within_half_a_step(tmp_path: Path, kind: str) -> None:
    """The documented bound: 1/254 of the largest absolute value in the row; vectors are exact."""
    c = case(kind)
    c = dataclasses.replace(c, params={**c.params, "fc": c.params["fc"].at[3].set(0.0)})
    write(tmp_path, c, quantize=True)
    assert json.loads((tmp_path / "config.json").read_text())["quantization"] == {"format": "dspark_jax_int8_rows"}
    names = set(SafetensorsSource(tmp_path).names())
    assert {"fc.weight.int8", "fc.weight.scale", "confidence_head.proj.weight"} <= names
    assert "fc.weight" not in names and stored_dtype(tmp_path) == np.float32
    pieces = read(tmp_path)
    assert pieces.config == c.config
    for spec, before, after in zip(
        spec_leaves(c.specs), jax.tree.leaves(c.params), jax.tree.leaves(pieces.params), strict=True
    ):
        before, after = np.asarray(before), np.asarray(after)
        if before.ndim == 2 and before.shape[0] > 1:
            bound = np.abs(before).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)
            assert (np.abs(before - after) <= bound).all(), spec.name
            assert not (before.any() and not after.any())
        else:
            assert same_array(before, after), spec.name
    assert not np.asarray(pieces.params["fc"])[3].any()


def test_int8_rows_of_any_scale_keep_the_bound() -> None:
    rng = np.random.default_rng(5)
    matrix = (rng.standard_normal((64, 33)) * 10.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    matrix[7] = 0
    values, scale = quantize_rows(matrix)
    error = np.abs(dequantize_rows(values, scale) - matrix)
    assert (error <= np.abs(matrix).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)).all()
    assert values.dtype == np.int8 and scale.dtype == np.float32 and np.abs(values).max() == 127
    with pytest.raises(ValueError, match="NaN"):
        quantize_rows(np.array([[np.nan, 1.0]]))


def test_int8_tensors_and_their_declaration_must_agree(tmp_path: Path) -> None:
    c = case()
    write(tmp_path, c, quantize=True)
    edit_config(tmp_path, quantization=None)
    with pytest.raises(ValueError, match="declares quantization = None, but .* tensors end in .int8"):
        read(tmp_path)
    edit_config(tmp_path, quantization={"format": "awq"})
    with pytest.raises(ValueError, match="unknown quantization .*awq"):
        read(tmp_path)
    edit_config(tmp_path, quantization={"format": "dspark_jax_int8_rows"})
    scale = SafetensorsSource(tmp_path).read("fc.weight.scale")
    edit_tensors(tmp_path, fc__weight__scale=None)
    with pytest.raises(ValueError, match="broken int8 tensors: fc.weight"):
        read(tmp_path)
    edit_tensors(tmp_path, fc__weight__scale=scale[:3])
    with pytest.raises(ValueError, match=r"broken int8 tensors: fc.weight \(.int8 is \(16, 48\), .scale is \(3,\)"):
        read(tmp_path)
    write(tmp_path, c)
    edit_config(tmp_path, quantization={"format": "dspark_jax_int8_rows"})
    with pytest.raises(ValueError, match="but 0 tensors end in .int8"):
        read(tmp_path)


def test_an_interrupted_write_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a config beside the weights of another drafter."""
    write(tmp_path, case())
    replace = os.replace

    def crash(source: str, destination: str) -> None:
        if str(destination).endswith("config.json"):
            raise OSError("disk full")
        replace(source, destination)

    monkeypatch.setattr(deepspec.os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, case("gated"))
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        read(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    write(tmp_path, case("gated"))
    assert read(tmp_path).config.markov_head == "gated"


def test_a_calibration_of_replaced_weights_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, case())
    (tmp_path / "calibration.json").write_text("{}")
    (tmp_path / "README.md").write_text("kept")
    with caplog.at_level(logging.WARNING):
        write(tmp_path, case())
    assert "calibration.json: removed" in caplog.text
    assert {p.name for p in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_further_config_keys_are_written(tmp_path: Path) -> None:
    write(tmp_path, case(), dtype=jnp.bfloat16, extra_config={"target_model_name_or_path": "tiny"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["target_model_name_or_path"], config["dtype"]) == ("tiny", "bfloat16")
    assert stored_dtype(tmp_path) == jnp.bfloat16 and read(tmp_path).params["fc"].dtype == jnp.bfloat16


def test_transformers_reads_the_config_we_write(tmp_path: Path) -> None:
    """DeepSpec's class is built from a Qwen3Config; every key it asks for is an attribute of it."""
    from transformers import Qwen3Config

    write(tmp_path, case())
    config = Qwen3Config.from_pretrained(tmp_path)
    wanted = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "block_size": 7,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "mask_token_id": 39,
        "target_layer_ids": [-1, 1, 3],
        "num_target_layers": TARGET_LAYERS,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    assert {key: getattr(config, key) for key in wanted} == wanted
