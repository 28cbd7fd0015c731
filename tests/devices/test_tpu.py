"""Whole cycles and training steps of Qwen3-8B with its DSpark drafter, compiled for TPUs that are not there.

All 36 layers, as one scan; XLA's own cost analysis counts a scan's body once, and so do the collectives here. A v6e
has 32 GB, a v5e 16 GB: the weights alone are 18.6 GB in bfloat16, so one v5e cannot hold them, which is asserted by
arithmetic, and the batch is as large as the chips allow.
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
from tests.devices.programs import Serving, Training

pytestmark = pytest.mark.aot_tpu

CONFIG = TARGETS["qwen3-8b"]
WIDTH = 8
GIB = 1 << 30
MEMORY = {"v5e": 16 * GIB, "v6e": 32 * GIB}  # a chip's, published
TOPOLOGY = {1: "2x2", 4: "2x2", 8: "2x4"}


@pytest.fixture(autouse=True)
def forms_of_a_tpu() -> Iterator[None]:
    with deviceless.as_if_on("tpu"):
        yield


@functools.cache
def serving(kind: str, devices: int, slots: int, cells: int) -> Serving:
    return Serving(deviceless.tpu_mesh(f"{kind}:{TOPOLOGY[devices]}", devices), CONFIG, slots, cells)


def size(tree: object) -> int:
    """Bytes on one device."""

    def part(x: jax.ShapeDtypeStruct) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)  # None: of one device
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(part, jax.tree.leaves(tree)))


def assert_sound(exe: jax.stages.Compiled, devices: int, loops: int, states: int) -> None:
    """No host inside; one device talks to nobody, several add up hidden states of ``states`` bytes ``loops`` times
    (a layer's two inside the loop, counted once) and exchange a few numbers a row, never logits."""
    program = Program(exe.as_text())
    assert program.host_transfers() == []
    found = program.collectives()
    if devices == 1:
        assert not found, found
        return
    large = {key: n for key, n in found.items() if key[1] >= states // 2}
    assert {kind for kind, _ in large} <= {"all-reduce"}, found
    assert sum(large.values()) <= loops, found


@pytest.mark.parametrize(
    ("kind", "devices", "slots", "cells"), [("v6e", 1, 8, 2048), ("v5e", 4, 32, 4096), ("v6e", 8, 64, 4096)]
)
def test_a_verify_forward_fits_and_updates_its_caches_in_place(kind: str, devices: int, slots: int, cells: int) -> None:
    """Bytes accessed: one layer's weights and cells (the body of the scan), the projections of five draft layers, the
    LM head, and at most 75 passes over the logits: sampling writes noise and bisects for top-k and top-p, and every
    branch counts. (Seen: 47 to 55. A cache that is copied whole, as a scatter had it, comes to more than 250.)"""
    engine = serving(kind, devices, slots, cells)
    exe = engine.verify().compile()
    memory = exe.memory_analysis()
    caches = size((engine.state.target, engine.state.draft))
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < min(caches, GIB)  # no second copy
    resident = size((engine.target.params, engine.drafter.params, engine.state))
    assert resident + memory.temp_size_in_bytes < 0.95 * MEMORY[kind]
    d, vocab, kv = CONFIG.hidden_size, CONFIG.vocab_size, 2 * 8 * 128
    layer = d * (2 * 4096 + kv) + 3 * d * CONFIG.intermediate_size
    read = 2 * (layer + slots * cells * kv + 5 * d * d + 5 * d * kv + d * vocab) / devices
    logits = 4 * slots * WIDTH * vocab / devices
    assert exe.cost_analysis()["bytes accessed"] < read + 75 * logits
    assert_sound(exe, devices, 3, slots * WIDTH * CONFIG.hidden_size * 2)


def test_the_weights_do_not_fit_one_v5e() -> None:
    engine = serving("v5e", 1, 1, 64)
    assert size((engine.target.params, engine.drafter.params)) > MEMORY["v5e"]


def test_drafting_a_block_on_eight_chips_fits_and_gathers_no_logits() -> None:
    engine = serving("v6e", 8, 64, 4096)
    exe = engine.draft().compile()
    memory = exe.memory_analysis()
    resident = size((engine.target.params, engine.drafter.params, engine.state))
    assert resident + memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.95 * MEMORY["v6e"]
    assert_sound(exe, 8, 11, 64 * 7 * CONFIG.hidden_size * 2)


def test_a_training_step_fits_updates_its_state_in_place_and_adds_up_hidden_states_alone() -> None:
    """Eight v5e, tensor parallel: all 36 layers of the target (one scan) and five of the drafter at the published
    widths, two texts of 512 tokens with 64 blocks of 7 each, logits in 4 parts, weights and both moments in float32
    and products in bfloat16. Sums over devices: two a layer of the target, four a layer of the drafter (forwards and
    backwards), of the context and of two embeddings; no logits, no weights, no gradients.

    Not proven: longer texts, whose attention the compiler gets in ever more pieces, and products in float32: those it
    unrolls into six times as many and takes minutes for a single one.
    """
    batch, length, anchors = 2, 512, 64
    training = Training(deviceless.tpu_mesh("v5e:2x4", 8), CONFIG, batch, length, anchors, 4)
    exe = training.lower().compile()
    memory = exe.memory_analysis()
    assert memory.alias_size_in_bytes >= size((training.state.params, training.state.opt_state))
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1e6
    assert memory.temp_size_in_bytes < GIB
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 0.95 * MEMORY["v5e"]
    program = Program(exe.as_text())
    assert program.host_transfers() == []
    found = program.collectives()
    assert {kind for kind, _ in found} == {"all-reduce"}, found
    states = 2 * CONFIG.hidden_size * batch * (length + anchors * 7)  # of context and slots, added up together
    assert max(of for _, of in found) < 1.001 * states, found
    assert sum(n for (_, of), n in found.items() if of > 1e6) <= 2 + 4 * 5 + 3, found
