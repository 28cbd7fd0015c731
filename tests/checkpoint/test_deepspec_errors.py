"""DeepSpec directories that do not fit: broken, of another target, or padded to another width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import Calibration
from dspark_jax.load import load_drafter
from tests.checkpoint.drafter_cases import (
    HIDDEN,
    KINDS,
    VOCAB,
    case,
    edit_config,
    edit_tensors,
    same_array,
    same_tree,
    target,
    target_config,
    target_view,
)
from tests.checkpoint.drafter_cases import read_case as read
from tests.checkpoint.drafter_cases import write_case as write

# --- refusing -----------------------------------------------------------------------------------------------


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    write(tmp_path, case())
    edit_tensors(tmp_path, confidence_head__proj__weight=None, markov_head__markov_w2__weight=None)
    with pytest.raises(ValueError, match="not in the checkpoint: confidence_head.proj.weight, markov_head.markov_w2"):
        read(tmp_path)
    write(tmp_path, case())
    edit_tensors(tmp_path, fc__weight=None, norm__weight=None, stray=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="(?s)missing tensors.*fc.weight.*norm.weight.*unexpected.*stray"):
        read(tmp_path)


def test_wrong_shapes_and_broken_values_are_named(tmp_path: Path) -> None:
    write(tmp_path, case(), embed=case().embed)
    edit_config(tmp_path, confidence_head_with_markov=False)
    with pytest.raises(ValueError, match=r"confidence_head.proj.weight is \(1, 20\), expected \(1, 16\)"):
        read(tmp_path)
    write(tmp_path, case())
    edit_tensors(tmp_path, hidden_norm__weight=np.full(HIDDEN, np.nan, np.float32))
    with pytest.raises(ValueError, match="hidden_norm.weight has 16 NaN"):
        read(tmp_path)
    write(tmp_path, case())
    edit_tensors(tmp_path, embed_tokens__weight=np.zeros((VOCAB + 1, HIDDEN), np.float32))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(41, 16\), expected \(40, 16\)"):
        read(tmp_path, target_view())


@pytest.mark.parametrize(
    ("offsets", "mask", "message"),
    [
        (None, None, "needs the tensor d2t"),
        (np.zeros(11, np.int64), None, r"must be 12 integers .*found int64 of shape \(11,\)"),
        (np.zeros(12, np.float32), None, "must be 12 integers .*found float32"),
        (np.full(12, 29), None, "maps draft id 11 to 40, outside the target's vocabulary of 40"),
        (np.full(12, -1), None, "maps draft id 0 to -1, outside"),
        (-np.arange(12), None, "maps 12 draft ids to target id 0"),
        (np.arange(28, 40), None, "outside.*look like target ids, where an offset is expected"),
        (np.zeros(12, np.int64), np.ones(40, bool), "t2d marks 40 tokens, d2t lists 12"),
        (np.zeros(12, np.int64), np.arange(40) > 27, "d2t lists target id 0, which t2d does not mark"),
        (
            np.zeros(12, np.int64),
            np.ones(39, bool),
            r"t2d must be a mask over 40 tokens, found shape \(39,\)",
        ),
    ],
)
def test_vocabulary_maps_are_checked(
    tmp_path: Path, offsets: np.ndarray | None, mask: np.ndarray | None, message: str
) -> None:
    """FIELD: range, duplicates, counts and agreement of d2t and t2d; a missing map is an error."""
    write(tmp_path, case("trimmed"))
    edit_tensors(tmp_path, d2t=offsets, t2d=mask)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_map_without_a_mask_is_enough(tmp_path: Path) -> None:
    c = case("trimmed")
    write(tmp_path, c)
    edit_tensors(tmp_path, t2d=None)
    ids = read(tmp_path).d2t
    assert ids is not None and same_array(ids, c.d2t)


TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden_size": 32}, "hidden_size is 16, the target's 32"),
    "layers": (
        {"layers": target_config().layers + target_config().layers[:1]},
        "trained for a target of 5 layers, this one has 6",
    ),
    "vocabulary": (
        {"vocab_size": 48},
        "vocabulary has 40 tokens, the target's 48 .*drafter of another target",
    ),
    "narrower vocabulary": ({"vocab_size": 32}, "vocabulary has 40 tokens, the target's 32"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_of_another_target_is_refused_with_both_numbers(tmp_path: Path, name: str) -> None:
    changes, message = TARGETS[name]
    write(tmp_path, case())
    with pytest.raises(ValueError, match=f"(?s){tmp_path}.*{message}"):
        read(tmp_path, target_view(target_config(**changes)))


def test_layers_the_target_lacks_or_hides_are_refused(tmp_path: Path) -> None:
    """The list of hidden states holds the normalised final state in the last layer's place."""
    write(tmp_path, case())
    edit_config(tmp_path, target_layer_ids=[0, 2, 4])
    with pytest.raises(ValueError, match="target_layer_ids has 4, the last decoder layer"):
        read(tmp_path, target_view())
    edit_config(tmp_path, target_layer_ids=[0, 2, 7], num_target_layers=None)
    with pytest.raises(ValueError, match=r"target_layer_ids \[7\] do not exist in a target of 5 layers"):
        read(tmp_path, target_view())


# --- heads padded to another width --------------------------------------------------------------------------


def test_a_wider_drafter_loses_the_rows_past_the_targets_head(tmp_path: Path) -> None:
    """FIELD: head padded to 40, tokenizer of 30, drafter of yet another width (40 against 36)."""
    c = case()
    write(tmp_path, c, embed=c.embed, head=c.head)
    view = target_view(target_config(vocab_size=36), tokens=30)
    pieces = read(tmp_path, view)
    assert (pieces.config.decoder.vocab_size, pieces.config.draft_vocab_size) == (36, 36)
    assert not pieces.config.trimmed and pieces.d2t is None
    assert same_array(pieces.params["markov"]["w1"], np.asarray(c.params["markov"]["w1"])[:36])
    assert same_array(pieces.params["markov"]["w2"], np.asarray(c.params["markov"]["w2"])[:36])
    assert same_array(pieces.head, c.head[:36])
    assert same_array(pieces.embed, c.embed)  # whole: the mask token's row lies past the target's head
    edit_tensors(tmp_path, embed_tokens__weight=None)
    with pytest.raises(ValueError, match="mask_token_id 39 is beyond the target's vocabulary of 36"):
        read(tmp_path, view)


def test_a_narrower_drafter_becomes_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    c = case()
    write(tmp_path, c)
    view = target_view(target_config(vocab_size=48), tokens=40)
    pieces = read(tmp_path, view)
    assert (pieces.config.decoder.vocab_size, pieces.config.draft_vocab_size) == (48, 40)
    assert pieces.config.trimmed and same_array(pieces.d2t, np.arange(40, dtype=np.int32))
    w1 = np.asarray(pieces.params["markov"]["w1"])
    assert same_array(w1[:40], c.params["markov"]["w1"]) and not w1[40:].any() and w1.shape == (48, 4)
    assert same_tree(pieces.params["markov"]["w2"], c.params["markov"]["w2"])
    assert same_array(pieces.head, np.asarray(view.head)[:40])


def test_a_trimmed_drafter_of_another_width_keeps_the_tokens_the_target_has(tmp_path: Path) -> None:
    c = case("trimmed")
    write(tmp_path, c, head=c.head, embed=c.embed)
    pieces = read(tmp_path, target_view(target_config(vocab_size=28), tokens=25))
    keep = np.flatnonzero(np.asarray(c.d2t) < 28)
    assert 0 < keep.size < 12
    assert same_array(pieces.d2t, np.asarray(c.d2t)[keep]) and pieces.config.draft_vocab_size == keep.size
    assert same_array(pieces.params["markov"]["w2"], np.asarray(c.params["markov"]["w2"])[keep])
    assert same_array(pieces.head, c.head[keep])


def test_a_vocabulary_smaller_than_the_tokenizer_or_far_larger_is_another_targets(tmp_path: Path) -> None:
    write(tmp_path, case())
    with pytest.raises(ValueError, match="40 tokens, the target's 48 .45 in its tokenizer"):
        read(tmp_path, target_view(target_config(vocab_size=48), tokens=45))
    with pytest.raises(ValueError, match="another target"):
        edit_config(tmp_path, vocab_size=40 + 4097, num_target_layers=None)
        c = case()
        wide = np.zeros((40 + 4097, 4), np.float32)
        edit_tensors(tmp_path, markov_head__markov_w1__weight=wide, markov_head__markov_w2__weight=wide)
        read(tmp_path, target_view(tokens=30))
    assert c.config.decoder.vocab_size == 40


# --- whole directories --------------------------------------------------------------------------------------


def test_broken_files_are_errors_that_name_the_file(tmp_path: Path) -> None:
    model = target()
    with pytest.raises(FileNotFoundError, match="no such directory.*smollm2-135m-instruct-dspark"):
        load_drafter(tmp_path / "nowhere", model)
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_drafter(tmp_path, model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        load_drafter(tmp_path, model)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, found list"):
        load_drafter(tmp_path, model)
    write(tmp_path, case())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: truncated"):
        load_drafter(tmp_path, model)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_drafter(tmp_path, model)
    with pytest.raises(ValueError, match="expected the directory"):
        load_drafter(tmp_path / "config.json", model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_drafter_takes_the_targets_dtype_and_limit(tmp_path: Path, kind: str) -> None:
    c = case(kind)
    write(tmp_path, c)
    model = target(jnp.bfloat16)
    drafter = load_drafter(tmp_path, model)
    assert {leaf.dtype for leaf in jax.tree.leaves(drafter.params)} == {jnp.dtype(jnp.bfloat16)}
    assert drafter.shared.embed is model.params["embed_tokens"] and drafter.name == tmp_path.name
    assert drafter.vocab_limit == VOCAB and drafter.config == c.config and drafter.calibration is None
    if drafter.d2t is not None:
        assert drafter.d2t.dtype == jnp.int32 and (np.asarray(drafter.d2t) == c.d2t).all()
    assert load_drafter(tmp_path, model, dtype="float32").params["fc"].dtype == jnp.float32


def test_a_calibration_beside_the_weights_is_loaded_and_must_fit_the_block(tmp_path: Path) -> None:
    write(tmp_path, case())
    model = target()
    Calibration(temperature=np.full(7, 1.5)).save(tmp_path / "calibration.json")
    calibration = load_drafter(tmp_path, model).calibration
    assert len(calibration.tables) == 1 and (calibration.tables[0].temperature == 1.5).all()
    Calibration(temperature=np.full(5, 1.5)).save(tmp_path / "calibration.json")
    with pytest.raises(ValueError, match="calibration.json.*7 entries expected, got 5"):
        load_drafter(tmp_path, model)


def test_an_embedding_of_another_target_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A target of the same shapes (a base model for its chat model): it loads, drafts badly, and nobody would know."""
    write(tmp_path, case())
    own = np.asarray(target().params["embed_tokens"])
    for copy, said in ((own, False), (own + 1, True)):
        edit_tensors(tmp_path, embed_tokens__weight=copy)
        caplog.clear()
        with caplog.at_level("WARNING"):
            load_drafter(tmp_path, target())
        assert ("embed_tokens.weight differs from the embedding of tiny" in caplog.text) == said
