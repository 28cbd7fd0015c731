"""The engine's own programs and the training step over a mesh of devices that are not there: shapes, no weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from published import drafter_config

from dspark_jax.config import DecoderConfig
from dspark_jax.cycle import Static
from dspark_jax.data.packing import BlockPlan
from dspark_jax.drafters import Drafter, drafter_specs
from dspark_jax.engine.buckets import Buckets, Key
from dspark_jax.engine.programs import Programs
from dspark_jax.sharding import abstract, stacked
from dspark_jax.targets import Target
from dspark_jax.targets.decoder import decoder_specs
from dspark_jax.train.config import LossConfig, OptimConfig
from dspark_jax.train.objective import Frozen
from dspark_jax.train.step import init_state, make_train_step
from dspark_jax.train.teacher import TeacherHead

PIECE = 256  # tokens of a piece of prompt
BF16 = jnp.bfloat16


def models(mesh: Mesh, config: DecoderConfig, block: int = 7, draft_layers: int = 5) -> tuple[Target, Drafter]:
    """A target with its layers stacked, as GPUs and TPUs run it, and its drafter, spread over ``mesh``."""
    params = abstract(decoder_specs(config), BF16, mesh)
    params["layers"] = stacked(params["layers"])
    target = Target.build(params, config, scan=True, fuse=False)
    wanted = drafter_config(config, block, draft_layers)
    embed = target.params["embed_tokens"]
    head = embed if config.tie_embeddings else target.params["lm_head"]
    return target, Drafter.build(
        abstract(drafter_specs(wanted), BF16, mesh), wanted, embed=embed, head=head, fuse=False
    )


class Serving:
    """The programs of an engine of ``slots`` slots of ``cells`` cells, to be lowered on shapes."""

    def __init__(self, mesh: Mesh, config: DecoderConfig, slots: int, cells: int, block: int = 7) -> None:
        self.mesh, self.slots, self.cells, self.block = mesh, slots, cells, block
        self.target, self.drafter = models(mesh, config, block)
        buckets = Buckets((slots,), (cells,), (), (PIECE,), {slots: (slots * (block + 1),)}, block, False)
        self.programs = Programs(
            self.target, self.drafter, buckets,
            slots=slots, stop_ids=8, rule="top_k", max_positions=config.max_positions, static=Static(),
        )  # fmt: skip
        self.state = self.programs.state_shapes()

    def lower(self, key: Key) -> jax.stages.Lowered:
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.programs.lower(key, self.state)

    def prefill(self) -> jax.stages.Lowered:
        return self.lower(Key("prefill", 0, PIECE, self.cells))

    def draft(self) -> jax.stages.Lowered:
        return self.lower(Key("draft", self.slots, 0, self.cells))

    def verify(self) -> jax.stages.Lowered:
        self.draft()  # its proposal is the argument
        return self.lower(Key("verify", self.slots, self.slots * (self.block + 1), self.cells))


class Training:
    """A step of training the drafter: the target reads ``batch`` texts of ``length`` tokens, then one update over
    ``anchors`` blocks of each. Drafter weights and optimiser state in float32, products and the frozen
    target in bfloat16."""

    def __init__(
        self,
        mesh: Mesh,
        config: DecoderConfig,
        batch: int,
        length: int,
        anchors: int,
        chunks: int,
        draft_layers: int = 5,
    ) -> None:
        self.mesh, self.batch, self.length = mesh, batch, length
        target, drafter = models(mesh, config, draft_layers=draft_layers)
        shared = drafter.shared
        self.frozen = Frozen(target, shared, TeacherHead(shared.head, None), None)
        optim = OptimConfig()
        params = abstract(drafter_specs(drafter.config), jnp.float32, mesh)
        state = jax.eval_shape(partial(init_state, optim=optim, seed=0), params)
        self.state = _placed(state, params, mesh)
        plan = BlockPlan.cycle(anchors, (drafter.config.block_size,))
        self.step = make_train_step(drafter.config, plan, 1, LossConfig(chunks=chunks, bfloat16=True), optim)

    def lower(self) -> jax.stages.Lowered:
        whole = NamedSharding(self.mesh, PartitionSpec())
        text = (self.batch, self.length)
        arguments = (
            jax.ShapeDtypeStruct(text, jnp.int32, sharding=whole),
            jax.ShapeDtypeStruct(text, jnp.bool_, sharding=whole),
            jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        )
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.step.lower(self.state, self.frozen, *arguments)


def _placed(state: Any, params: Any, mesh: Mesh) -> Any:
    """The optimiser's means lie where their parameters do, all else on every device."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    places = {jax.tree_util.keystr(path): leaf.sharding for path, leaf in leaves}

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path)
        at = next((s for key, s in places.items() if name.endswith(key)), NamedSharding(mesh, PartitionSpec()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return jax.tree_util.tree_map_with_path(place, state)
