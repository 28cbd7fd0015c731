"""scripts/convert_checkpoint.py: plain DeepSpec directories for other engines, speculators, and int8."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import Calibration
from dspark_jax.checkpoint import SafetensorsSource, save
from dspark_jax.checkpoint.drafter_files import read_drafter
from dspark_jax.config_io import decoder_config_to_hf
from dspark_jax.drafters import drafter_specs
from dspark_jax.params import is_spec
from dspark_jax.targets import decoder_specs
from tests.checkpoint.drafter_cases import case, same_array, same_tree, target_config, target_params
from tests.checkpoint.drafter_cases import write_case as write
from tests.oracle import oracle_dir


def script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "convert_checkpoint.py"
    spec = importlib.util.spec_from_file_location("convert_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


convert = script()


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    """The tiny target as a Hugging Face directory."""
    config = target_config()
    tensors: dict[str, Any] = {}
    jax.tree.map(
        lambda spec, x: tensors.setdefault(spec.name, np.asarray(x)),
        decoder_specs(config),
        target_params(),
        is_leaf=is_spec,
    )
    directory = tmp_path / "target"
    save(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(decoder_config_to_hf(config)))
    return directory


def run(source: Path, output: Path, *flags: str | Path) -> int:
    return convert.main(["--input", str(source), "--output", str(output), *map(str, flags)])


def names(directory: Path) -> set[str]:
    return set(SafetensorsSource(directory).names())


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "dflash", "widths"])
def test_full_writes_what_other_engines_expect(tmp_path: Path, target_dir: Path, kind: str) -> None:
    """Copies included, floats, no map: what DeepSpec's own class has as parameters."""
    c = case(kind)
    write(tmp_path / "ours", c)
    assert run(tmp_path / "ours", tmp_path / "full", "--to", "deepspec", "--full", "--target", target_dir) == 0
    pieces = read_drafter(tmp_path / "full", drafter_specs)
    assert pieces.config == c.config and same_tree(pieces.params, c.params)
    assert same_array(pieces.embed, c.embed) and same_array(pieces.head, c.head)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert not config.keys() & {"quantization", "draft_vocab_size", "sample_from_anchor"}
    assert {"embed_tokens.weight", "lm_head.weight"} <= names(tmp_path / "full")


def test_full_undoes_int8(tmp_path: Path, target_dir: Path) -> None:
    c = case()
    write(tmp_path / "small", c, quantize=True)
    assert run(tmp_path / "small", tmp_path / "full", "--full", "--target", target_dir, "--dtype", "bfloat16") == 0
    source = SafetensorsSource(tmp_path / "full")
    assert {source.dtype(name) for name in source.names()} == {np.dtype(jnp.bfloat16)}
    assert "quantization" not in json.loads((tmp_path / "full" / "config.json").read_text())
    small = read_drafter(tmp_path / "small", drafter_specs).params["fc"]
    assert same_array(source.read("fc.weight"), small.astype(jnp.bfloat16))


def test_full_refuses_a_trimmed_vocabulary_saying_why(
    tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "trimmed", case("trimmed"))
    assert run(tmp_path / "trimmed", tmp_path / "out", "--full", "--target", target_dir) == 1
    message = capsys.readouterr().err
    assert "12 of 40 tokens" in message and "no d2t map" in message and "speculators layout takes it" in message
    write(tmp_path / "fill", case("fill-in"))
    assert run(tmp_path / "fill", tmp_path / "out", "--full", "--target", target_dir) == 1
    assert "DeepSpec's own is anchor-first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_copies_ask_for_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ours", case())
    assert run(tmp_path / "ours", tmp_path / "out", "--full") == 1
    assert "no embed_tokens.weight of its own; name the target to take it from (--target)" in capsys.readouterr().err
    write(tmp_path / "trimmed", case("trimmed"))
    assert run(tmp_path / "trimmed", tmp_path / "out", "--to", "speculators") == 1
    assert "no lm_head.weight of its own" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["vanilla", "trimmed", "permuted", "fill-in", "dflash"])
def test_speculators_takes_every_vocabulary_and_the_way_back_gives_the_same_drafter(
    tmp_path: Path, target_dir: Path, kind: str
) -> None:
    c = case(kind)
    write(tmp_path / "ours", c)
    assert run(tmp_path / "ours", tmp_path / "spec", "--to", "speculators", "--target", target_dir) == 0
    assert "speculators_model_type" in json.loads((tmp_path / "spec" / "config.json").read_text())
    assert ("lm_head.weight" in names(tmp_path / "spec")) == (kind in ("trimmed", "permuted"))
    assert "embed_tokens.weight" not in names(tmp_path / "spec")
    assert run(tmp_path / "spec", tmp_path / "back", "--target", target_dir) == 0
    assert not names(tmp_path / "back") & {"embed_tokens.weight", "lm_head.weight"}  # the target has them
    view = convert.target_view(convert.load_target(target_dir, dtype="float32"))
    before = read_drafter(tmp_path / "ours", drafter_specs, target=view)
    after = read_drafter(tmp_path / "back", drafter_specs, target=view)
    assert same_array(rows_by_target_id(before), rows_by_target_id(after))
    assert same_array(before.params["fc"], after.params["fc"])
    assert before.config.sample_from_anchor == after.config.sample_from_anchor
    assert before.config.target_layer_ids == after.config.target_layer_ids


def rows_by_target_id(pieces: Any) -> np.ndarray:
    """Head and W2 rows, put at their target ids."""
    ids = np.arange(pieces.config.decoder.vocab_size) if pieces.d2t is None else pieces.d2t
    rows = np.asarray(pieces.head)
    if "markov" in pieces.params:
        rows = np.concatenate([rows, np.asarray(pieces.params["markov"]["w2"])], axis=1)
    out = np.zeros((pieces.config.decoder.vocab_size, rows.shape[1]), rows.dtype)
    out[ids] = rows
    return out


def test_copies_equal_to_the_targets_are_dropped_unless_asked_for(tmp_path: Path, target_dir: Path) -> None:
    c = case(dtype=jnp.bfloat16)
    write(tmp_path / "full", c, embed=c.embed, head=c.head)
    assert run(tmp_path / "full", tmp_path / "alone") == 0
    assert "lm_head.weight" in names(tmp_path / "alone")  # without a target nobody knows
    write(tmp_path / "own", c, embed=c.embed, head=c.head + 1)
    assert run(tmp_path / "own", tmp_path / "kept", "--target", target_dir) == 0
    assert names(tmp_path / "kept") & {"embed_tokens.weight", "lm_head.weight"} == {"lm_head.weight"}
    assert run(tmp_path / "full", tmp_path / "slim", "--target", target_dir, "--int8") == 0
    assert not names(tmp_path / "slim") & {"embed_tokens.weight", "lm_head.weight"}
    assert "fc.weight.int8" in names(tmp_path / "slim")


def test_a_calibration_goes_along(tmp_path: Path, target_dir: Path) -> None:
    write(tmp_path / "ours", case())
    Calibration(temperature=np.full(7, 1.5)).save(tmp_path / "ours" / "calibration.json")
    assert run(tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--target", target_dir) == 0
    loaded = Calibration.load(tmp_path / "out" / "calibration.json", positions=7)
    assert (np.asarray(loaded.temperature) == 1.5).all()


def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = oracle_dir() / "qwen3_dspark_vanilla" / "draft"
    assert run(source, tmp_path / "out", "--target", target_dir) == 1
    assert "drafter of another target" in capsys.readouterr().err


def test_the_reference_checkpoints_convert_without_loss(tmp_path: Path) -> None:
    root = oracle_dir()
    for name in ("qwen3_dspark_gated", "qwen3_dflash"):
        source = root / name / "draft"
        flags = ("--target", root / "targets" / "qwen3_tiny")
        assert run(source, tmp_path / name / "spec", "--to", "speculators", *flags) == 0
        assert run(tmp_path / name / "spec", tmp_path / name / "full", "--full", *flags) == 0
        before, after = SafetensorsSource(source), SafetensorsSource(tmp_path / name / "full")
        assert set(before.names()) == set(after.names())
        assert all(same_array(before.read(key), after.read(key)) for key in before.names())


def test_settings_come_from_a_file_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "convert.toml"
    settings.write_text('input = "a"\noutput = "b"\nto = "speculators"\n')
    config = convert.parse(["--config", str(settings), "--set", "dtype=float32", "--output", "c"])
    assert (config.input, config.output, config.to, config.dtype) == ("a", "c", "speculators", "float32")
    settings.write_text('inputs = "a"\n')
    with pytest.raises(ValueError, match="unknown key inputs"):
        convert.parse(["--config", str(settings)])
    assert convert.main(["--config", str(settings)]) == 1
    with pytest.raises(SystemExit):
        convert.parse([])
    assert "missing: --input, --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--to", "speculators", "--full"), "choices of the deepspec layout"),
        (("--full", "--int8"), "other engines do not read int8"),
    ],
)
def test_choices_that_exclude_each_other_are_errors(
    tmp_path: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "ours", case())
    assert run(tmp_path / "ours", tmp_path / "out", *flags) == 1
    assert message in capsys.readouterr().err


def test_the_input_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ours", case())
    assert run(tmp_path / "ours", tmp_path / "." / "ours") == 1
    assert "output and input are the same directory" in capsys.readouterr().err
    assert run(tmp_path / "nowhere", tmp_path / "out") == 1
    assert "no such directory" in capsys.readouterr().err
