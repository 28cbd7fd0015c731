"""Drafter configs: four spellings, two block layouts, two conventions of layer numbers (FIELD.md)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from dspark_jax.drafter_io import (
    UnsupportedDrafterError,
    drafter_config_from_hf,
    drafter_config_to_hf,
    drafter_config_to_speculators,
    drafts_of_slots,
    head_tensors,
    slots_of_drafts,
)
from tests.checkpoint.drafter_cases import BACKBONE, DRAFTER, FLAT, SPELLINGS, flat, read, spelled
from tests.oracle import oracle_dir

HEADS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_one_drafter_gives_one_config(spelling: str) -> None:
    """FIELD: flat, ``dspark_*``, nested, speculators: all read, none misread."""
    assert read(spelled(spelling)) == read(flat())
    config = read(spelled(spelling))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (7, 39, (-1, 1, 3))
    assert (config.markov_rank, config.markov_head, config.confidence_head) == (4, "vanilla", True)
    assert (config.method, config.num_target_layers, config.trimmed) == ("dspark", 5, False)


def test_layer_ids_are_decoder_layers_in_deepspec_and_hidden_states_in_speculators() -> None:
    """FIELD: DeepSpec's i is speculators' i + 1, and -1 (the embeddings) its 0; converted both ways."""
    assert read(flat(target_layer_ids=[0, 2, 4])).target_layer_ids == (0, 2, 4)
    assert read({**spelled("speculators"), "aux_hidden_state_layer_ids": [0, 2, 4]}).target_layer_ids == (
        -1,
        1,
        3,
    )
    config = read(flat(target_layer_ids=[-1, 1, 3]))
    assert drafter_config_to_hf(config)["target_layer_ids"] == [-1, 1, 3]
    assert drafter_config_to_speculators(config)["aux_hidden_state_layer_ids"] == [0, 2, 4]


Z_LAB = {"block_size": 7, "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3]}, **BACKBONE}
FORMATS: dict[str, tuple[dict[str, Any], bool]] = {
    "deepspec": (flat(), True),
    "deepspec dflash": (flat(markov_rank=0, enable_confidence_head=False), True),
    "nested deepspec dflash": ({**spelled("dflash_config"), "markov_rank": 4}, True),
    "speculators-dspark": (spelled("speculators"), True),
    "speculators-dflash": (
        {**spelled("speculators"), "speculators_model_type": "dflash", "markov_rank": 0}
        | {"enable_confidence_head": False, "confidence_head_with_markov": False},
        False,
    ),
    "z-lab dflash": (Z_LAB, False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_silent_config_has_its_formats_documented_layout_and_the_log_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """FIELD: read as the other layout, acceptance is 1.0 with no error."""
    raw, anchor = FORMATS[name]
    with caplog.at_level(logging.INFO, "dspark_jax.load"):
        config = read(raw)
    assert config.sample_from_anchor is anchor
    assert config.block_size == (7 if anchor else 6)
    assert ("anchor-first" if anchor else "fill-in") in caplog.text and "default" in caplog.text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("anchor", [True, False])
def test_a_declared_layout_wins_over_the_default(name: str, anchor: bool, caplog: pytest.LogCaptureFixture) -> None:
    raw, _ = FORMATS[name]
    for key, value in {
        "sample_from_anchor": anchor,
        "query_zero_predicts_next": anchor,
        "dspark_bonus_anchor": not anchor,
    }.items():
        if key == "dspark_bonus_anchor" and "dflash" in name:
            continue  # a DSpark key: it would make the config another format
        with caplog.at_level(logging.INFO, "dspark_jax.load"):
            assert read({**raw, key: value}).sample_from_anchor is anchor, key
        assert "as the file says" in caplog.text


def test_block_size_counts_slots_in_files_and_drafts_in_the_config() -> None:
    """FIELD: gamma against gamma + 1; one conversion, used both ways."""
    for slots in range(2, 9):
        for anchor in (True, False):
            drafts = drafts_of_slots(slots, anchor)
            assert drafts == (slots if anchor else slots - 1)
            assert slots_of_drafts(drafts, anchor) == slots
            config = read(flat(block_size=slots, sample_from_anchor=anchor))
            assert config.block_size == drafts
            assert config.block_width(drafts) == slots
            assert drafter_config_to_hf(config)["block_size"] == slots
            assert drafter_config_to_speculators(config)["block_size"] == slots
    with pytest.raises(ValueError, match="block_size 1 leaves no draft"):
        read(flat(block_size=1, sample_from_anchor=False))


def test_proposals_that_contradict_the_layout_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """Exports older than sample_from_anchor say block_size - 1 tokens a block and mean the fill-in layout."""
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}]}
    config = read({**spelled("speculators"), "speculators_config": {"algorithm": "dspark", **proposals}})
    assert config.block_size == 7
    assert "proposes 6 tokens a block where this layout makes 7" in caplog.text


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_missing_mask_token_is_an_error_that_lists_what_was_found(spelling: str) -> None:
    """FIELD: defaulted to 0 in the field; never defaulted here."""
    raw = spelled(spelling)
    for scope in [raw, *[value for value in raw.values() if isinstance(value, dict)]]:
        for key in ("mask_token_id", "dspark_noise_token_id"):
            scope.pop(key, None)
    raw["pad_token_id"] = 0
    with pytest.raises(ValueError, match="no mask_token_id.*found.*pad_token_id") as error:
        read(raw)
    assert "block_size" in str(error.value) and "somewhere/config.json" in str(error.value)


@pytest.mark.parametrize("value", [-1, True, 3.0, "39", 40])
def test_a_mask_token_outside_the_vocabulary_is_an_error(value: object) -> None:
    with pytest.raises(ValueError, match="mask_token_id"):
        read(flat(mask_token_id=value))


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids"])
def test_block_size_and_layer_ids_are_never_defaulted(key: str) -> None:
    with pytest.raises(ValueError, match=f"no {key}.*found"):
        read(flat(**{key: None}))


def test_a_config_of_something_else_is_refused_with_the_keys_it_has() -> None:
    with pytest.raises(ValueError, match="no block_size.*found.*vocab_size"):
        read(dict(BACKBONE))
    with pytest.raises(ValueError, match="found an empty config"):
        read({})


@pytest.mark.parametrize(
    "raw",
    [
        {**flat(), "dspark_gamma": 7},
        {**spelled("dspark_config"), "dspark_config": {**DRAFTER, "mask_tokn_id": 1}},
        {**spelled("dflash_config"), "dflash_config": {**DRAFTER, "rank": 8}},
    ],
)
def test_an_unknown_spelling_is_an_error_that_lists_it(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown spelling: .*(gamma|mask_tokn_id|rank)"):
        read(raw)


def test_two_places_that_disagree_are_an_error_naming_both() -> None:
    with pytest.raises(ValueError, match="contradicting values for block_size: block_size = 7, .*block_size = 5"):
        read(flat(dspark_block_size=5))
    with pytest.raises(ValueError, match="contradicting values for target_layer_ids"):
        read(flat(aux_hidden_state_layer_ids=[1, 3]))
    assert read(flat(aux_hidden_state_layer_ids=[0, 2, 4])) == read(flat())  # the same layers, counted differently
    assert read(flat(dspark_block_size=7)) == read(flat())


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        (
            {},
            HEADS,
            "declared but not in the checkpoint: confidence_head.proj.bias, confidence_head.proj.weight",
        ),
        ({}, CONFIDENCE, "declared but not in the checkpoint: markov_head.markov_w1.weight, .*w2"),
        (
            {"markov_head_type": "gated"},
            HEADS + CONFIDENCE,
            "not in the checkpoint: markov_head.gate_proj.bias",
        ),
        (
            {"markov_head_type": "rnn"},
            HEADS + CONFIDENCE,
            "not in the checkpoint: markov_head.joint_proj.bias",
        ),
        ({"enable_confidence_head": False}, HEADS + CONFIDENCE, "not declared: confidence_head.proj.bias"),
        (
            {"markov_rank": 0, "confidence_head_with_markov": False},
            HEADS + CONFIDENCE,
            "not declared: markov_head.markov_w1",
        ),
        ({}, (*HEADS, *CONFIDENCE, "markov_head.gate_proj.weight"), "not declared: markov_head.gate_proj"),
    ],
)
def test_heads_and_their_tensors_must_agree(changes: dict[str, Any], names: tuple[str, ...], message: str) -> None:
    """FIELD: a head declared whose tensors are missing, or the other way round, is an error naming them."""
    with pytest.raises(ValueError, match=message):
        read(flat(**changes), *names)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_heads_whose_tensors_are_there_are_accepted(head: str) -> None:
    config = read(flat(markov_head_type=head))
    assert read(flat(markov_head_type=head), "fc.weight", *head_tensors(config)) == config
    stored = [f"{name}{part}" for name in head_tensors(config) for part in (".int8", ".scale")]
    assert read(flat(markov_head_type=head), *stored) == config


def test_a_confidence_head_that_reads_w1_needs_one() -> None:
    with pytest.raises(ValueError, match="confidence_head_with_markov needs a Markov head"):
        read(flat(markov_rank=0))
    assert not read(flat(confidence_head_with_markov=False)).confidence_with_markov


def test_an_unknown_markov_head_is_an_error_naming_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown markov_head_type 'lstm', known: vanilla, gated, rnn"):
        read(flat(markov_head_type="lstm"))


def test_a_reduced_draft_vocabulary_needs_its_map() -> None:
    """FIELD: a missing map is an error."""
    names = (*HEADS, *CONFIDENCE)
    with pytest.raises(ValueError, match="draft_vocab_size 12 of 40 needs the tensor d2t"):
        read(flat(draft_vocab_size=12), *names)
    with pytest.raises(ValueError, match="t2d without d2t"):
        read(flat(), *names, "t2d")
    with pytest.raises(ValueError, match="draft_vocab_size 41 exceeds vocab_size 40"):
        read(flat(draft_vocab_size=41))
    config = read(flat(draft_vocab_size=12), *names, "d2t", "t2d")
    assert (config.draft_vocab_size, config.trimmed) == (12, True)
    assert read(flat(), *names, "d2t").trimmed  # the whole vocabulary in another order


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-2, 1], "1", [1, 2.0]])
def test_layer_ids_must_be_strictly_increasing_integers(ids: object) -> None:
    with pytest.raises(ValueError, match="target_layer_ids"):
        read(flat(target_layer_ids=ids))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eagle3 of two layers": (
        {**BACKBONE, "ttt_length": 7, "target_layer_ids": [0, 1]},
        "EAGLE-3 drafters of 2 layers",
    ),
    "eagle3 of another layout": ({**BACKBONE, "architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
    "eagle3 of two layers in speculators": (
        {**spelled("speculators"), "speculators_model_type": "eagle3"},
        "EAGLE-3 drafters of 2 layers",
    ),
    "eagle1": ({**spelled("speculators"), "speculators_model_type": "eagle"}, "EAGLE-1"),
    "eagle3 with experts": (
        {**BACKBONE, "num_hidden_layers": 1, "ttt_length": 7, "target_layer_ids": [0, 1], "num_experts": 8},
        "mixture-of-experts",
    ),
    "mtp with experts": (
        {**BACKBONE, "num_hidden_layers": 1, "method": "mtp", "target_layer_ids": [4], "n_routed_experts": 8},
        "mixture-of-experts",
    ),
    "mtp of two modules": (
        {**BACKBONE, "num_hidden_layers": 1, "method": "mtp", "target_layer_ids": [4], "num_nextn_predict_layers": 2},
        "MTP drafters of 2 modules",
    ),
    "mtp of speculators": ({**spelled("speculators"), "speculators_model_type": "mtp"}, "MTP"),
    "mtp": ({**BACKBONE, "model_type": "qwen3_next_mtp"}, "MTP"),
    "mtp layers": ({**BACKBONE, "num_nextn_predict_layers": 1}, "MTP"),
    "peagle": (
        {**spelled("speculators"), "speculators_model_type": "peagle"},
        "speculators_model_type.*'peagle'",
    ),
    "gemma3": (flat(model_type="gemma3_text"), "Gemma"),
    "gemma3 nested": (
        {**spelled("speculators"), "transformer_layer_config": {**BACKBONE, "model_type": "gemma3_text"}},
        "Gemma",
    ),
    "experts": (flat(num_experts=64), "mixture-of-experts"),
    "deepseek v4": (flat(model_type="deepseek_v4"), "DeepSeek-V4"),
    "dflash2": ({**spelled("speculators"), "speculators_model_type": "dflash2"}, "DFlash2"),
    "domino": ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "projector_type": "domino"}}, "Domino"),
    "causal": ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "causal": True}}, "causal blocks"),
    "quantised": (flat(quantization_config={"quant_algo": "NVFP4"}), "quantised by other tools"),
    "narrower": ({**flat(), "target_hidden_size": 32}, "narrower or wider than their target"),
    "causal windows": (
        {
            **spelled("speculators"),
            "transformer_layer_config": {
                **BACKBONE,
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 8,
            },
        },
        "sliding_window_non_causal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_drafters_that_cannot_run_are_refused_by_name(name: str) -> None:
    raw, kind = REFUSED[name]
    with pytest.raises(UnsupportedDrafterError, match=f"somewhere/config.json: .*{kind}.*not supported yet"):
        read(raw)


def test_the_architecture_string_alone_decides_nothing() -> None:
    """FIELD: dispatch is on model_type and the keys present; exporters copy names from elsewhere."""
    for name in ("DFlashDraftModel", "Qwen3Eagle3Model", "Qwen3ForCausalLM", "SomethingElse"):
        assert read(flat(architectures=[name])) == read(flat())
    assert read(flat(architectures=None)) == read(flat())
    bare = {**BACKBONE, "block_size": 7, "mask_token_id": 39, "target_layer_ids": [1, 3]}
    assert read(bare).sample_from_anchor
    assert not read({**bare, "architectures": ["DFlashDraftModel"]}).sample_from_anchor  # no key says otherwise


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({**Z_LAB, "use_sliding_window": True, "sliding_window": 8}, (8, 8)),
        ({**Z_LAB, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (0, 8)),
        ({**Z_LAB, "use_sliding_window": False, "sliding_window": 8}, (0, 0)),
        ({**Z_LAB, "sliding_window": None}, (0, 0)),
        (
            {**Z_LAB, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            (0, 8),
        ),
        (
            {**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 6}}
            | {"layer_types": ["full_attention"] * 2},
            (6, 6),
        ),
        (
            {**spelled("speculators"), "sliding_window_non_causal": True, "sliding_window": 8}
            | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, 0),
        ),
    ],
)
def test_a_trained_window_is_never_ignored(raw: dict[str, Any], windows: tuple[int, ...]) -> None:
    """FIELD: acceptance 11 % instead of 48 % where use_sliding_window was dropped."""
    assert tuple(layer.window for layer in read(raw).decoder.layers) == windows


def test_our_own_keys_are_written_only_where_they_say_something() -> None:
    plain = drafter_config_to_hf(read(flat()))
    assert not plain.keys() & {"draft_vocab_size", "block_widths", "sample_from_anchor", "quantization"}
    ours = flat(draft_vocab_size=12, block_widths=[1, 3], sample_from_anchor=False)
    written = drafter_config_to_hf(read(ours))
    assert {key: written[key] for key in ("draft_vocab_size", "block_widths", "sample_from_anchor")} == {
        "draft_vocab_size": 12,
        "block_widths": [1, 3],
        "sample_from_anchor": False,
    }
    assert read(written) == read(ours)
    with pytest.raises(ValueError, match=r"block_widths must lie in 1\.\.7"):
        read(flat(block_widths=[0, 8]))


ORACLE = ("qwen3_dspark_vanilla", "qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_dflash")

# Of a Gemma 4 drafter: shapes and positions of sliding layers, which it does not have, and keys that say nothing
# once the decoder is dense.
UNUSED_BY_GEMMA4 = frozenset(
    """head_dim num_key_value_heads rope_parameters sliding_window moe_intermediate_size num_experts top_k_experts
    use_bidirectional_attention vocab_size_per_layer_input target_model_type target_text_model_type""".split()
)


@pytest.mark.parametrize("name", [*ORACLE, "gemma4_dspark"])
def test_configs_of_the_reference_survive_reading_and_writing(name: str) -> None:
    """All the keys that DeepSpec's classes read come back with their values."""
    raw = json.loads((oracle_dir() / name / "draft" / "config.json").read_text())
    config = drafter_config_from_hf(raw, source=name)
    written = drafter_config_to_hf(config)
    assert drafter_config_from_hf(written, source=name) == config
    training = {"num_anchors", "initializer_range", "attention_dropout", "use_cache", "max_window_layers"}
    unused = UNUSED_BY_GEMMA4 if name == "gemma4_dspark" else set()
    for key in raw.keys() - training - unused - {"dtype", "transformers_version"}:
        assert written[key] == raw[key], key
    assert isinstance(written["num_anchors"], int)  # DeepSpec's class refuses to start without it


@pytest.mark.parametrize("name", [*ORACLE, "gemma4_dspark"])
def test_the_speculators_spelling_of_a_reference_config_is_the_same_drafter(name: str) -> None:
    raw = json.loads((oracle_dir() / name / "draft" / "config.json").read_text())
    config = drafter_config_from_hf(raw, source=name)
    again = drafter_config_from_hf(drafter_config_to_speculators(config), source=name)
    assert again.num_target_layers == 0  # that layout has no place for it
    assert drafter_config_to_hf(again) == {**drafter_config_to_hf(config), "num_target_layers": 0}


def test_reading_leaves_the_config_as_it_was() -> None:
    for spelling in SPELLINGS:
        raw = spelled(spelling)
        before = json.dumps(raw, sort_keys=True)
        read(raw)
        assert json.dumps(raw, sort_keys=True) == before
    assert FLAT["block_size"] == 7
