"""GGUF: what the reader finds is what the writer of the tests put there, in every block format we decode."""

from __future__ import annotations

import importlib.util
import math
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint import restore
from dspark_jax.checkpoint.gguf import GGUFSource, decoder_config_from_gguf
from dspark_jax.checkpoint.gguf_file import GGUFFile
from dspark_jax.config import LayerConfig, RopeConfig
from dspark_jax.load import load_target
from dspark_jax.targets import decoder_specs
from tests.checkpoint.gguf_writer import (
    SIZES,
    TYPE_IDS,
    encode,
    llama_metadata,
    permute,
    tiny_weights,
    write_gguf,
    write_tiny,
)


@pytest.mark.parametrize("kind", TYPE_IDS)
def test_weights_come_back_exactly_in_every_type_of_ours(tmp_path: Path, kind: str) -> None:
    expected = write_tiny(tmp_path / "tiny.gguf", kind)
    source = GGUFSource(tmp_path / "tiny.gguf")
    assert set(source.names()) == set(expected)
    for name, value in expected.items():
        assert source.shape(name) == value.shape
        np.testing.assert_array_equal(source.read(name).astype(np.float32), value, err_msg=name)


@pytest.mark.parametrize("kind", [k for k in TYPE_IDS if k.startswith("Q")])
def test_the_writer_really_quantises(kind: str) -> None:
    """Guards the test above against an encoder whose decoded values are far from what it was given."""
    weights = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    error = np.abs(encode(weights, kind)[1] - weights).max()
    assert 0 < error < {"Q8_0": 0.03, "Q5_0": 0.15, "Q5_1": 0.1}.get(kind, 0.3)


def test_query_and_key_rows_of_llama_files_are_put_back_in_order() -> None:
    """Two heads of 4 rows: the file has 0 2 1 3 | 4 6 5 7 where the model has 0..7 (pairs against halves)."""
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert permute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_permuted_bias_is_put_back_too(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    data = encode(permute(bias[:, None], SIZES["heads"]), "F32")[0]
    write_gguf(tmp_path / "b.gguf", llama_metadata(), {"blk.0.attn_q.bias": (data, (64,), "F32")})
    name = "model.layers.0.self_attn.q_proj.bias"
    np.testing.assert_array_equal(GGUFSource(tmp_path / "b.gguf").read(name), bias)


def test_qwen3_files_are_not_permuted_and_have_query_and_key_norms(tmp_path: Path) -> None:
    expected = write_tiny(tmp_path / "q.gguf", "Q8_0", arch="qwen3", **{"qwen3.attention.key_length": 16})
    source = GGUFSource(tmp_path / "q.gguf")
    config = decoder_config_from_gguf(source)
    assert config.family == "qwen3" and config.qk_norm and not config.tie_embeddings
    params = restore(decoder_specs(config), source, np.float32)
    attn = params["layers"][1]["attn"]
    for leaf in ("q_proj", "k_norm"):
        np.testing.assert_array_equal(attn[leaf], expected[f"model.layers.1.self_attn.{leaf}.weight"])


def test_metadata_becomes_the_config_and_a_missing_head_means_tied(tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.{k}_token_id": v for k, v in {"bos": 1, "eos": 2, "eot": 3, "padding": 0}.items()}
    write_tiny(tmp_path / "t.gguf", tied=True, **ids)
    config = decoder_config_from_gguf(GGUFSource(tmp_path / "t.gguf"))
    assert config.family == "llama" and config.tie_embeddings
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (40, 64, 96)
    assert config.layers == (LayerConfig(2, 16, RopeConfig(theta=10000.0)),) * 2
    assert config.rms_norm_eps == 1e-5  # stored as float32
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2, 3), 0)
    assert config.max_positions == 128


def test_load_target_reads_a_gguf_file_without_a_tokenizer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write_tiny(tmp_path / "tiny.gguf", "Q4_0")
    target = load_target(tmp_path / "tiny.gguf", dtype="float32")
    assert target.tokenizer is None and target.name == "tiny"
    assert "no tokenizer" in caplog.text
    down = target.params["layers"][0]["mlp"]["down_proj"]
    np.testing.assert_array_equal(down, expected["model.layers.0.mlp.down_proj.weight"])


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    """llama.cpp bakes Llama 3's scaling into rope_freqs.weight and leaves the metadata silent."""
    theta, factor, trained, head_dim = 500000.0, 32.0, 8192, 16
    divisors = []
    for i in range(head_dim // 2):  # the rule as transformers' llama3 function states it
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < trained / 4:
            divisors.append(1.0)
        elif wavelength > trained:
            divisors.append(factor)
        else:
            smooth = (trained / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    metadata = llama_metadata() | {"llama.rope.freq_base": theta}
    data = encode(np.asarray(divisors, np.float32), "F32")[0]
    embed = np.zeros((40, 64), np.float32).tobytes()
    tensors = {"rope_freqs.weight": (data, (8,), "F32"), "token_embd.weight": (embed, (40, 64), "F32")}
    source = GGUFSource(write_gguf(tmp_path / "l3.gguf", metadata, tensors))
    rope = decoder_config_from_gguf(source).layers[0].rope
    assert rope == RopeConfig("llama3", theta, factor, 1.0, 4.0, trained)
    assert "rope_freqs.weight" not in source.names()

    data = encode(np.asarray([1, 2, 3, 4, 5, 6, 7, 8], np.float32), "F32")[0]
    tensors["rope_freqs.weight"] = (data, (8,), "F32")
    source = GGUFSource(write_gguf(tmp_path / "odd.gguf", metadata, tensors))
    with pytest.raises(ValueError, match="rope_freqs.weight holds frequencies that are not Llama 3's"):
        decoder_config_from_gguf(source)


@pytest.mark.parametrize(
    ("kind", "extra", "want"),
    [
        ("linear", {}, RopeConfig("linear", 10000.0, 4.0)),
        (
            "yarn",
            {"llama.rope.scaling.original_context_length": 32},
            RopeConfig("yarn", 10000.0, 4.0, original_max_positions=32),
        ),
    ],
)
def test_rope_scaling_is_read_from_metadata(tmp_path: Path, kind: str, extra: dict[str, int], want: RopeConfig) -> None:
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, **extra}
    write_tiny(tmp_path / "r.gguf", **scaling)
    assert decoder_config_from_gguf(GGUFSource(tmp_path / "r.gguf")).layers[0].rope == want


def test_unsupported_features_are_listed_together(tmp_path: Path) -> None:
    extra = {"llama.attention.value_length": 8, "llama.rope.scaling.type": "longrope"}
    write_tiny(tmp_path / "u.gguf", **extra, **{"llama.attention.sliding_window": 16})
    with pytest.raises(ValueError, match=r"u\.gguf: unsupported: .*value_length.*longrope.*sliding-window"):
        decoder_config_from_gguf(GGUFSource(tmp_path / "u.gguf"))
    write_tiny(tmp_path / "moe.gguf", **{"llama.expert_count": 8})
    with pytest.raises(ValueError, match=r"moe\.gguf.*\n.*mixture of experts"):
        decoder_config_from_gguf(GGUFSource(tmp_path / "moe.gguf"))


def test_missing_metadata_is_listed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", "llama.block_count": 1}, {})
    with pytest.raises(ValueError, match=r"m\.gguf: the GGUF file lacks llama\.embedding_length.*token_embd"):
        decoder_config_from_gguf(GGUFSource(tmp_path / "m.gguf"))


def test_a_tensor_of_no_known_name_is_reported_as_unexpected(tmp_path: Path) -> None:
    weights = tiny_weights()
    write_tiny(tmp_path / "ok.gguf")
    config = decoder_config_from_gguf(GGUFSource(tmp_path / "ok.gguf"))
    tensors = {"blk.0.attn_sinks.weight": (np.zeros(4, np.float32).tobytes(), (4,), "F32")}
    source = GGUFSource(write_gguf(tmp_path / "x.gguf", llama_metadata(), tensors))
    with pytest.raises(ValueError) as error:
        restore(decoder_specs(config), source, np.float32)
    assert f"missing tensors ({len(weights)})" in str(error.value)
    assert "unexpected tensors (1):\n    blk.0.attn_sinks.weight" in str(error.value)


@pytest.mark.parametrize("keep", [3, 30, 400, 5000, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    write_tiny(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf: (truncated|not a GGUF file)"):
        GGUFSource(path)


def test_every_prefix_of_a_header_is_refused_cleanly(tmp_path: Path) -> None:
    """No IndexError, struct.error or endless loop, wherever the file was cut."""
    path = tmp_path / "cut.gguf"
    write_gguf(path, {"general.architecture": "llama", "a": ["b", "cd"], "n": [1, 2, 3], "x": 1.5}, {})
    whole = path.read_bytes().rstrip(b"\0")
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUFFile(path)


def test_wrong_magic_version_and_architecture_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(ValueError, match=r"no\.gguf: not a GGUF file"):
        GGUFSource(tmp_path / "no.gguf")
    write_gguf(tmp_path / "v1.gguf", llama_metadata(), {}, version=1)
    with pytest.raises(ValueError, match=r"v1\.gguf: GGUF version 1 is not supported"):
        GGUFSource(tmp_path / "v1.gguf")
    write_gguf(tmp_path / "big.gguf", llama_metadata(), {}, version=3 << 24)
    with pytest.raises(ValueError, match=r"big\.gguf: GGUF big-endian version 3"):
        GGUFSource(tmp_path / "big.gguf")
    write_gguf(tmp_path / "arch.gguf", llama_metadata("mamba"), {})
    with pytest.raises(ValueError, match=r"arch\.gguf: unsupported GGUF architecture 'mamba'.*llama, qwen3"):
        GGUFSource(tmp_path / "arch.gguf")
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf"):
        GGUFSource(tmp_path / "gone.gguf")


def test_a_corrupt_count_does_not_ask_for_huge_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    array = struct.pack("<IIQ", 9, 5, 1 << 60)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1s", 1, b"k") + array)
    with pytest.raises(ValueError, match=r"huge\.gguf: truncated"):
        GGUFSource(path)


def _k_quant_file(path: Path) -> Path:
    tensor = (b"\0" * 144, (1, 256), 12)
    return write_gguf(path, llama_metadata(), {"blk.0.attn_v.weight": tensor})


def test_a_type_we_do_not_decode_names_itself_and_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GGUFSource(_k_quant_file(tmp_path / "k.gguf"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find_spec(name, *rest)
    )
    with pytest.raises(ValueError, match=r"blk\.0\.attn_v\.weight is quantised as Q4_K.*pip install gguf"):
        source.read("model.layers.0.self_attn.v_proj.weight")


def test_other_types_go_through_the_gguf_package(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    value = GGUFSource(_k_quant_file(tmp_path / "k.gguf")).read("model.layers.0.self_attn.v_proj.weight")
    np.testing.assert_array_equal(value, np.zeros((1, 256), np.float32))


@pytest.mark.real_model
def test_the_embedded_target_loads_whole() -> None:
    """210 + 1 + 61 tensors; every weight finite (restoring checks that); the head tied."""
    target = load_target("smollm2-135m-instruct", dtype="float32")
    leaves = jax.tree.leaves(target.params)
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    config = target.config
    assert (config.num_layers, config.num_heads, config.vocab_size) == (30, 9, 49152)
    assert config.layers[0] == LayerConfig(3, 64, RopeConfig(theta=100000.0))
    assert config.tie_embeddings and config.eos_token_ids == (2,) and config.max_positions == 8192
    assert target.name == "smollm2-135m-instruct" and target.vocab_limit == 49152
