"""Head and verification at Qwen3-8B's shapes, compiled for an H100 and for TPUs on a machine that has none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels import deviceless
from pallas_kernels.markov_sample import Block, Head, markov_sample
from pallas_kernels.verify import Rows, row_statistics

ROWS, PLACES, VOCAB, RANK, HIDDEN = 64, 7, 151_936, 256, 4096


def compiled_head(mesh: Mesh, implementation: str) -> jax.stages.Compiled:
    a, bf = partial(deviceless.abstract, mesh), jnp.bfloat16
    head = Head(
        a((VOCAB, RANK), bf), a((VOCAB, RANK), bf), confidence=a((1, HIDDEN + RANK), bf), confidence_bias=a((1,), bf)
    )
    words = a((PLACES, ROWS), jnp.uint32)
    base, hidden = a((PLACES, ROWS, VOCAB), bf), a((PLACES, ROWS, HIDDEN), bf)
    block = Block(base, hidden, a((ROWS,), jnp.int32), a((ROWS,), jnp.float32), words, words, None)
    run = jax.jit(partial(markov_sample, implementation=implementation, aot=True))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run.lower(head, block).compile()


def compiled_rows(mesh: Mesh, implementation: str) -> jax.stages.Compiled:
    """The pass over the target's logits of 64 requests with 7 drafts each."""
    a, count = partial(deviceless.abstract, mesh), ROWS * (PLACES + 1)
    side, words = a((count,), jnp.float32), a((count,), jnp.uint32)
    rows = Rows(a((count, VOCAB), jnp.float32), side, side, words, words, a((count,), jnp.int32))
    run = jax.jit(partial(row_statistics, implementation=implementation, aot=True))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run.lower(rows).compile()


OPS = {"head": compiled_head, "rows": compiled_rows}


def assert_small(exe: jax.stages.Compiled) -> None:
    """No second copy of W2 (78 MB), of base logits (136 MB) or of target logits (311 MB); the Hopper kernels leave five
    numbers a tile and row (12 MB for 512 rows)."""
    memory = exe.memory_analysis()
    assert memory.temp_size_in_bytes < 16e6
    assert memory.output_size_in_bytes < 1e6


@pytest.mark.aot
@pytest.mark.parametrize("op", OPS)
def test_hopper_kernel_is_in_the_program_and_nothing_of_width_v_is_copied(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its registers do not spill: ptxas says so in the dump."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    exe = OPS[op](deviceless.h100_mesh(), "mosaic_gpu")
    assert "mosaic_gpu" in exe.as_text()
    assert_small(exe)
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert reports
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report


@pytest.mark.aot_tpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("op", OPS)
def test_tpu_kernel_is_in_the_program_and_nothing_of_width_v_is_copied(op: str, topology: str) -> None:
    exe = OPS[op](deviceless.tpu_mesh(topology), "tpu")
    assert "tpu_custom_call" in exe.as_text()
    assert_small(exe)
