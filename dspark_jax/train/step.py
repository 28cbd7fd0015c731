"""The jitted programs of training: one optimiser step, one held-out measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan
from dspark_jax.train.config import LossConfig, OptimConfig
from dspark_jax.train.objective import Frozen, acceptance, loss, prepare
from dspark_jax.train.optim import keep_buffers, optimizer
from dspark_jax.types import Array, PyTree


@flax.struct.dataclass
class TrainState:
    """Enough to resume bit for bit."""

    step: Array  # [] int32 steps taken
    params: PyTree
    opt_state: PyTree
    key: Array  # base key; the key of a step is folded from it
    cursor: Array  # [] int32: the next record
    positions: Array  # [] float32: slots that counted in the loss so far
    skipped: Array  # [] int32: steps in a row whose loss or gradient was not finite


def init_state(params: PyTree, optim: OptimConfig, seed: int) -> TrainState:
    """The state before the first step."""

    def zero() -> Array:  # each its own buffer: the state is donated
        return jnp.array(0, jnp.int32, copy=True)

    return TrainState(
        step=zero(),
        params=params,
        opt_state=optimizer(optim, 0.0).init(params),
        key=jax.random.key_data(jax.random.key(seed)),
        cursor=zero(),
        positions=jnp.array(0, jnp.float32, copy=True),
        skipped=zero(),
    )


def make_train_step(
    config: DrafterConfig, plan: BlockPlan, settings: LossConfig, optim: OptimConfig
) -> Callable[[TrainState, Frozen, Array, Array, Array], tuple[TrainState, dict[str, Array]]]:
    """``step(state, frozen, tokens [B, L], loss_mask [B, L], rate []) -> (state, metrics)``; the state is donated."""

    def step(
        state: TrainState, frozen: Frozen, tokens: Array, loss_mask: Array, rate: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        lesson = jax.lax.stop_gradient(prepare(config, frozen, plan, key, tokens, loss_mask))

        def objective(params: PyTree) -> tuple[Array, Any]:
            value = loss(config, settings, frozen, plan, params, lesson)
            return value.total, value

        (total, terms), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
        norm = optax.global_norm(gradient)
        updates, opt_state = optimizer(optim, rate).update(gradient, state.opt_state, state.params)
        good = jnp.isfinite(total) & jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (optax.apply_updates(state.params, keep_buffers(updates)), opt_state),
            (state.params, state.opt_state),
        )
        counted = jnp.sum(lesson.slots.mask)
        new = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            cursor=state.cursor + tokens.shape[0],
            positions=state.positions + counted,
            skipped=jnp.where(good, 0, state.skipped + 1),
        )
        metrics = {
            "total": total,
            "grad_norm": norm,
            **{f"{name}_num": getattr(terms, name)[0] for name in ("ce", "l1", "confidence")},
            **{f"{name}_den": getattr(terms, name)[1] for name in ("ce", "l1", "confidence")},
        }
        return new, metrics

    return jax.jit(step, donate_argnums=0)


def make_heldout_step(
    config: DrafterConfig, plan: BlockPlan
) -> Callable[[PyTree, Frozen, Array, Array, Array], dict[str, Array]]:
    """``measure(params, frozen, key, tokens, loss_mask) -> objective.acceptance``."""

    def measure(params: PyTree, frozen: Frozen, key: Array, tokens: Array, loss_mask: Array) -> dict[str, Array]:
        lesson = prepare(config, frozen, plan, key, tokens, loss_mask)
        return acceptance(config, frozen, plan, params, lesson)

    return jax.jit(measure)
