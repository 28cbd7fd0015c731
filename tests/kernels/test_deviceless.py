"""Head, verification and attention at Qwen3-8B's shapes, compiled for an H100 and for TPUs on a machine without."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels import deviceless
from pallas_kernels.markov_sample import Block, Head, markov_sample
from pallas_kernels.slot_attention import Cells, Own, Tokens, slot_attention
from pallas_kernels.verify import Rows, row_statistics

ROWS, PLACES, VOCAB, RANK, HIDDEN = 64, 7, 151_936, 256, 4096
CELLS = (ROWS, 8, 4096, 128)  # of a layer: keys take 0.54 GB, as do values
LAYER = 2 * 2 * math.prod(CELLS)


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


def compiled_attention(mesh: Mesh, implementation: str, own: bool = False) -> jax.stages.Compiled:
    """64 requests of 8 tokens (a draft block of 7 with ``own``) against the second of two layers of slots."""
    a, bf, i32 = partial(deviceless.abstract, mesh), jnp.bfloat16, jnp.int32
    width = PLACES + (not own)
    count = ROWS * width
    flat, request, cell = a((count,), i32), a((ROWS,), i32), a((2, *CELLS), bf)
    tokens = Tokens(flat, flat, a((ROWS, width), i32), request, request, request)
    block = Own(*[a((count, *CELLS[1::2]), bf)] * 2) if own else None
    run = jax.jit(partial(slot_attention, scale=0.09, implementation=implementation))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run.lower(a((count, 32, 128), bf), tokens, Cells(cell, cell, a((), i32)), block).compile()


OPS = {"head": compiled_head, "rows": compiled_rows}
ATTENTION = {"attention": compiled_attention, "draft attention": partial(compiled_attention, own=True)}


def assert_small(exe: jax.stages.Compiled) -> None:
    """No second copy of W2 (78 MB), of base logits (136 MB) or of target logits (311 MB); the Hopper kernels leave five
    numbers a tile and row (12 MB for 512 rows)."""
    memory = exe.memory_analysis()
    assert memory.temp_size_in_bytes < 16e6
    assert memory.output_size_in_bytes < 1e6


@pytest.mark.aot
@pytest.mark.parametrize("op", [*OPS, *ATTENTION])
def test_hopper_kernel_is_in_the_program_and_nothing_large_is_copied(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its registers do not spill: ptxas says so in the dump."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    exe = (OPS | ATTENTION)[op](deviceless.h100_mesh(), "mosaic_gpu")
    assert "mosaic_gpu" in exe.as_text()
    if op in OPS:
        assert_small(exe)
    else:
        assert exe.memory_analysis().temp_size_in_bytes < LAYER / 20  # queries, results, a block's own keys
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


@pytest.mark.aot_tpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_jaxs_ragged_paged_attention_is_in_the_program_behind_a_copy_of_the_layer(topology: str) -> None:
    """That copy is why it is taken by name only: no temporaries beyond it and a second one of it."""
    exe = compiled_attention(deviceless.tpu_mesh(topology), "tpu")
    assert "tpu_custom_call" in exe.as_text()
    assert LAYER <= exe.memory_analysis().temp_size_in_bytes < 2.2 * LAYER
