"""Safetensors and restoring: interchange with the reference library, one error with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.checkpoint import (
    RenamedSource,
    SafetensorsSource,
    check,
    restore,
    restore_abstract,
    save,
)
from dspark_jax.params import ParamSpec


def spec(name: str, *shape: int, **options: Any) -> ParamSpec:
    return ParamSpec(shape, (None,) * len(shape), name, **options)


SPECS = {
    "w": spec("w", 2, 3),
    "layers": [{"b": spec("layers.0.b", 3)}, {"b": spec("layers.1.b", 3)}],
    "map": spec("map", 4, integer=True),
    "extra": spec("extra", 2, optional=True),
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(2, 3)).astype(np.float32),
        "layers.0.b": rng.normal(size=3).astype(ml_dtypes.bfloat16),
        "layers.1.b": rng.normal(size=3).astype(np.float16),
        "map": np.arange(4, dtype=np.int64),
    }


def source(path: Path, **changes: np.ndarray | None) -> SafetensorsSource:
    """A file of ``tensors()`` with some changed, added or (None) removed."""
    merged = {**tensors(), **{name.replace("__", "."): value for name, value in changes.items()}}
    save(path / "model.safetensors", {name: value for name, value in merged.items() if value is not None})
    return SafetensorsSource(path)


def test_what_we_write_the_reference_library_reads_and_the_other_way_round(tmp_path: Path) -> None:
    values = {
        **tensors(),
        "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 4), np.uint8),
        "mask": np.array([True, False]),
        "jax": jnp.ones((2,), jnp.bfloat16),
    }
    save(tmp_path / "ours.safetensors", values, {"note": "x"})
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert set(theirs) == set(values)
    for name, value in values.items():
        assert theirs[name].dtype == np.asarray(value).dtype
        np.testing.assert_array_equal(theirs[name], np.asarray(value))
    safetensors.numpy.save_file(tensors(), tmp_path / "theirs.safetensors")
    ours = SafetensorsSource(tmp_path / "theirs.safetensors")
    for name, value in tensors().items():
        assert ours.dtype(name) == value.dtype and ours.shape(name) == value.shape
        np.testing.assert_array_equal(ours.read(name), value)
    assert SafetensorsSource(tmp_path / "ours.safetensors").metadata == {"format": "pt", "note": "x"}


def test_restoring_casts_floats_keeps_integers_and_leaves_optional_tensors_out(tmp_path: Path) -> None:
    params = restore(SPECS, source(tmp_path), jnp.bfloat16)
    assert params["w"].dtype == jnp.bfloat16 and params["layers"][1]["b"].dtype == jnp.bfloat16
    assert params["map"].dtype == jnp.int32 and params["map"].tolist() == [0, 1, 2, 3]
    assert params["extra"] is None
    np.testing.assert_array_equal(params["w"], tensors()["w"].astype(ml_dtypes.bfloat16))
    params = restore(SPECS, source(tmp_path, extra=np.ones(2, np.float32)), jnp.float32)
    assert params["extra"].tolist() == [1.0, 1.0]


def test_restored_weights_do_not_change_when_the_file_is_rewritten_in_place(tmp_path: Path) -> None:
    params = restore({"w": SPECS["w"]}, source(tmp_path), np.float32, allow_extra=["layers.*", "map"])
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    np.testing.assert_array_equal(params["w"], tensors()["w"])


def test_put_gets_each_array_with_its_spec(tmp_path: Path) -> None:
    seen: list[str] = []

    def put(array: np.ndarray, spec: ParamSpec) -> np.ndarray:
        assert isinstance(array, np.ndarray) and array.shape == spec.shape
        seen.append(spec.name)
        return array

    restore(SPECS, source(tmp_path), np.float32, put=put)
    assert sorted(seen) == ["layers.0.b", "layers.1.b", "map", "w"]


def test_the_abstract_tree_has_the_shapes_of_the_restored_one(tmp_path: Path) -> None:
    src = source(tmp_path)
    abstract, real = restore_abstract(SPECS, src, jnp.bfloat16), restore(SPECS, src, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), real)


def test_all_missing_extra_and_misshapen_tensors_are_in_one_error(tmp_path: Path) -> None:
    bad = source(tmp_path, w=np.zeros((3, 2), np.float32), map=None, layers__1__b=None, z=np.zeros(1), a=np.zeros(1))
    for function in (check, lambda specs, src: restore(specs, src, np.float32)):
        with pytest.raises(ValueError) as error:
            function(SPECS, bad)
        assert str(error.value).splitlines() == [
            f"{tmp_path}: the checkpoint does not fit the model",
            "  missing tensors (2):",
            "    layers.1.b",
            "    map",
            "  unexpected tensors (2):",
            "    a",
            "    z",
            "  wrong shapes (1):",
            "    w is (3, 2), expected (2, 3)",
        ]


def test_extra_tensors_are_allowed_by_pattern_and_derived_buffers_always(tmp_path: Path) -> None:
    extra = {"lm_head__weight": np.zeros(1), "layers__0__rotary_emb__inv_freq": np.zeros(4)}
    src = source(tmp_path, **extra)
    check(SPECS, src, allow_extra=["lm_head.weight"])
    with pytest.raises(ValueError, match=r"unexpected tensors \(1\):\n    lm_head\.weight"):
        check(SPECS, src)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_an_error_that_names_the_tensor(
    tmp_path: Path, dtype: Any, value: float
) -> None:
    w = np.ones((2, 3), dtype)
    w[1, 2] = value
    with pytest.raises(ValueError, match=r"tensor w has 1 NaN or infinite values of 6 \(the first at \(1, 2\)"):
        restore(SPECS, source(tmp_path, w=w), dtype)


def test_large_finite_weights_whose_sum_overflows_are_fine(tmp_path: Path) -> None:
    w = np.full((2, 3), 3e38, np.float32)
    assert float(restore(SPECS, source(tmp_path, w=w), np.float32)["w"].max()) == np.float32(3e38)


def test_a_weight_too_large_for_the_dtype_asked_for_is_an_error(tmp_path: Path) -> None:
    w = np.full((2, 3), 1e5, np.float32)
    with pytest.raises(ValueError, match=r"tensor w has 6 NaN or infinite values of 6 .*as float16"):
        restore(SPECS, source(tmp_path, w=w), np.float16)


def test_integers_for_floats_and_floats_for_integers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor w holds int8, expected floats"):
        restore(SPECS, source(tmp_path, w=np.zeros((2, 3), np.int8)), np.float32)
    with pytest.raises(ValueError, match="tensor map holds float32, expected integers"):
        restore(SPECS, source(tmp_path, map=np.zeros(4, np.float32)), np.float32)
    with pytest.raises(ValueError, match="tensor map holds integers from 0 to 4294967296"):
        restore(SPECS, source(tmp_path, map=np.array([0, 1, 2, 2**32])), np.float32)


def test_float64_without_x64_is_refused_and_with_it_restored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        restore(SPECS, source(tmp_path), np.float64)
    with jax.enable_x64(True):
        assert restore(SPECS, source(tmp_path), np.float64)["w"].dtype == np.float64


def sharded(path: Path) -> None:
    values = tensors()
    names = sorted(values)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for shard, held in shards.items():
        save(path / shard, {name: values[name] for name in held})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_sharded_checkpoint_is_one_source(tmp_path: Path) -> None:
    sharded(tmp_path)
    src = SafetensorsSource(tmp_path)
    assert sorted(src.names()) == sorted(tensors())
    np.testing.assert_array_equal(restore(SPECS, src, np.float32)["w"], tensors()["w"])


def test_shards_that_are_missing_or_lack_a_tensor_are_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "b.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"index\.json: tensors that their shard does not hold: ghost \(b\.safe"):
        SafetensorsSource(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard files are missing: a\.safetensors"):
        SafetensorsSource(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: no valid index"):
        SafetensorsSource(tmp_path)


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    source(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated|no JSON"):
            SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "dtype F4; known are"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "occupies 8 bytes, expected 12"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "corrupt header"),
        ({"dtype": "F32", "shape": [2]}, "corrupt header entry of tensor x"),
    ],
)
def test_a_corrupt_header_names_the_tensor(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ValueError, match=rf"bad\.safetensors.*{message}"):
        SafetensorsSource(tmp_path / "bad.safetensors")


def test_a_place_without_weights_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*found: pytorch_model\.bin"):
        SafetensorsSource(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        SafetensorsSource(tmp_path / "nowhere")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(path, {"w": np.ones(2)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="tensor c has dtype complex128"):
        save(path, {"c": np.ones(2, complex)})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_renamed_tensors_keep_their_values_and_collisions_are_errors(tmp_path: Path) -> None:
    src = source(tmp_path)
    renamed = RenamedSource(src, lambda name: None if name == "map" else f"text.{name}")
    assert "text.w" in renamed.names() and len(renamed.names()) == 3
    np.testing.assert_array_equal(renamed.read("text.w"), tensors()["w"])
    with pytest.raises(ValueError, match="both mean same"):
        RenamedSource(src, lambda name: "same")
