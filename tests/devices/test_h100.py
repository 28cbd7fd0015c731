"""Whole cycles and training steps of Qwen3-8B with its DSpark drafter, compiled for H100s that are not there.

Nothing is scaled down: 36 layers (as one scan, which is how a GPU runs them, so depth costs no compile time), the
published widths and vocabulary, 64 slots of 4,096 cells. Memory figures are XLA's own, of one device of the mesh. What
this cannot see: speed, the choice of matrix kernels (there is no device to tune on) and run-time errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import pytest
from hlo import Program
from published import TARGETS

from pallas_kernels import deviceless
from tests.devices.programs import PIECE, Serving, Training

pytestmark = pytest.mark.aot

SLOTS, CELLS, WIDTH = 64, 4096, 8
CONFIG = TARGETS["qwen3-8b"]
CAPACITY = deviceless.H100["device_memory_size"]
CACHE = 2 * CONFIG.num_layers * SLOTS * 8 * CELLS * 128 * 2  # bytes of keys and values
DRAFT_CACHE = CACHE // CONFIG.num_layers * 5
MAX_SCORES = 1 << 24  # of attention at once; all rows' [S, H, W, L] would be 2^26
GIB = 1 << 30
HEADROOM = 4 * GIB  # CUDA's context, library workspaces, fragmentation


@pytest.fixture(autouse=True)
def forms_of_a_gpu() -> Iterator[None]:
    with deviceless.as_if_on("gpu"):
        yield


@functools.cache
def serving(devices: int) -> Serving:
    return Serving(deviceless.h100_mesh(devices), CONFIG, SLOTS, CELLS)


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Program]:
    exe = lowered.compile()
    return exe, Program(exe.as_text())


def used(exe: jax.stages.Compiled) -> int:
    """Bytes at the worst moment: arguments, temporaries, and results that are not arguments' own memory."""
    m = exe.memory_analysis()
    return m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def resident(serving: Serving) -> int:
    """Bytes of one device that stay: weights of both models, and all caches."""

    def part(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)  # None: of one device
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(part, jax.tree.leaves((serving.target.params, serving.drafter.params, serving.state))))


def assert_sound(program: Program, exe: jax.stages.Compiled, launches: int) -> None:
    """What holds of every program: no host inside, no scores of all rows at once, a bounded number of launches."""
    assert program.host_transfers() == []
    assert program.launches() <= launches, program.launches()
    wide = CONFIG.vocab_size
    scores = {n for dtype, n in program.arrays() if dtype == "f32" and n > MAX_SCORES and n % wide and n % (wide // 8)}
    assert not scores, scores
    assert exe.memory_analysis().temp_size_in_bytes < 3 * GIB


def assert_exchanges(program: Program, devices: int, products: int, tokens: int) -> None:
    """One device talks to nobody. Several add up hidden states ``[tokens, d]`` once for each of ``products`` (those of
    row-parallel weights, and lookups of an embedding); what else they exchange is a few numbers a row, never logits."""
    found = program.collectives()
    if devices == 1:
        assert not found, found
        return
    states = tokens * CONFIG.hidden_size * 2
    large = {key: n for key, n in found.items() if key[1] >= states // 2}
    assert {kind for kind, _ in large} <= {"all-reduce"}, found
    assert sum(large.values()) <= products, found
    assert max(size for _, size in found) <= 2 * states, found  # a start holds its argument too


@pytest.mark.parametrize("devices", [1, 8])
def test_a_verify_forward_fits_updates_its_caches_in_place_and_never_leaves_the_device(devices: int) -> None:
    """64 requests of up to 4,096 tokens, 8 tokens each. Two sums over devices a layer, one for the embedding."""
    engine = serving(devices)
    exe, program = compiled(engine.verify())
    memory = exe.memory_analysis()
    assert resident(engine) + memory.temp_size_in_bytes + HEADROOM < CAPACITY
    assert memory.alias_size_in_bytes >= (CACHE + DRAFT_CACHE) // devices
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e6
    assert_sound(program, exe, 2600)  # branches of conditions counted, so also the filters of a rebuilt draft row
    assert_exchanges(program, devices, 2 * CONFIG.num_layers + 1, SLOTS * WIDTH)


@pytest.mark.parametrize("devices", [1, 8])
def test_drafting_a_block_fits_and_never_leaves_the_device(devices: int) -> None:
    """Five layers of 64 blocks of 7, then the sequential head. W1 is whole on every device: looking up the token before
    exchanges nothing."""
    engine = serving(devices)
    exe, program = compiled(engine.draft())
    memory = exe.memory_analysis()
    made = memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert resident(engine) + made + HEADROOM < CAPACITY
    assert_sound(program, exe, 3500)
    assert_exchanges(program, devices, 2 * 5 + 1, SLOTS * 7)


def test_a_piece_of_prompt_fits_beside_the_caches_and_updates_them_in_place() -> None:
    """256 tokens of one request; their scores over 4,096 cells are 134 MB of float32, made in two pieces of queries."""
    engine = serving(1)
    exe, program = compiled(engine.prefill())
    memory = exe.memory_analysis()
    assert resident(engine) + memory.temp_size_in_bytes + HEADROOM < CAPACITY
    assert memory.alias_size_in_bytes >= CACHE + DRAFT_CACHE
    assert_sound(program, exe, 1600)
    assert_exchanges(program, 1, 0, PIECE)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_training_step_fits_and_updates_its_state_in_place(devices: int) -> None:
    """Two texts of 2,048 tokens, 128 blocks of 7 each, logits in 8 parts. The state (weights and both moments of 1.05
    billion parameters in float32) is donated; products are in bfloat16."""
    exe, program = compiled(Training(deviceless.h100_mesh(devices), CONFIG, 2, 2048, 128, 8).lower())
    memory = exe.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * 4 * 1.0e9 // devices
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e6
    assert used(exe) + HEADROOM < CAPACITY
    assert program.host_transfers() == []
    if devices == 1:
        assert not program.collectives()
