"""A whole cycle compiled for an H100 on a machine that has none: every kernel is in it, nobody had to name one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import Sampling, cycle
from dspark_jax.cycle import DecodeState
from dspark_jax.testing import open_slots, tiny_drafter, tiny_target
from pallas_kernels import deviceless

ROWS, DRAFTS = 4, 3


def described(mesh: Mesh, tree: Any) -> Any:
    """The tree without its values, replicated over ``mesh``."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), tree)


def lowered_cycle(mesh: Mesh) -> jax.stages.Lowered:
    """Draft and verification of a bfloat16 model with heads of 64 and a Markov head of rank 128."""
    target = tiny_target(vocab_size=256, hidden_size=128, num_layers=2, head_dim=64, dtype=jnp.bfloat16, scan=True)
    drafter = tiny_drafter(target, block_size=DRAFTS)
    prompts = jnp.zeros((ROWS, 3), jnp.int32)

    def run(target: Any, drafter: Any, state: DecodeState) -> Any:
        proposal = cycle.draft(drafter, state, num_drafts=DRAFTS)
        return cycle.step(target, drafter, state, proposal, jnp.full(ROWS, DRAFTS))

    opened = partial(open_slots, max_new_tokens=20, sampling=Sampling(0.8))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(opened, target, drafter, prompts)
        assert state.draft.cache.length == (64 if mesh.size == 1 else 27)  # a whole tile for the kernel
        return jax.jit(run).lower(*described(mesh, (target, drafter, state)))


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """A program for a device that is not here can be written to JAX's cache, but not read back from it."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.aot
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_cycle_takes_all_three_kernels_on_hopper_and_none_for_several_devices() -> None:
    """Of several devices the abstract mesh tells; a kernel is not cut for them."""
    text = lowered_cycle(deviceless.h100_mesh()).compile().as_text()
    # draft attention and target attention; the head; the pass over the target's logits
    assert text.count('custom_call_target="mosaic_gpu') >= 4
    assert "mosaic_gpu" not in lowered_cycle(deviceless.h100_mesh(2)).as_text()
