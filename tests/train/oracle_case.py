"""A DSpark or DFlash case of the oracle as the trainer sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.deepspec import read_deepspec
from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, Slots, pack
from dspark_jax.drafters.base import SharedParams
from dspark_jax.drafters.dspark import drafter_specs
from tests.oracle import oracle_dir

CASES = ("qwen3_dspark_vanilla", "qwen3_dspark_gated", "qwen3_dspark_rnn", "qwen3_dflash", "gemma4_dspark")


class Case(NamedTuple):
    config: DrafterConfig
    params: Any
    shared: SharedParams
    train: dict[str, np.ndarray]
    plan: BlockPlan
    slots: Slots


def load_case(name: str) -> Case:
    """The drafter and the ``train.`` arrays of a case, packed as blocks of full width."""
    folder = oracle_dir() / name
    pieces = read_deepspec(folder / "draft", drafter_specs)
    arrays = np.load(folder / "expected.npz")
    train = {key.removeprefix("train."): arrays[key] for key in arrays.files if key.startswith("train.")}
    plan = BlockPlan((pieces.config.block_size,) * train["anchors"].shape[1])
    slots = pack(
        plan,
        jnp.asarray(train["anchors"]),
        jnp.asarray(train["block_keep_mask"]),
        jnp.asarray(train["input_ids"]),
        jnp.asarray(train["loss_mask"] > 0),
        pieces.config.mask_token_id,
    )
    shared = SharedParams(jnp.asarray(pieces.embed), jnp.asarray(pieces.head), None)
    return Case(pieces.config, jax.tree.map(jnp.asarray, pieces.params), shared, train, plan, slots)
