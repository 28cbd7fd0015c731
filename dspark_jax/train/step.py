"""The jitted programs of training: a step over a few sequences, and a held-out measurement."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan, sample_anchors
from dspark_jax.nn.linear import linear
from dspark_jax.targets import Target
from dspark_jax.train.config import LossConfig, OptimConfig
from dspark_jax.train.objective import Frozen, Lesson, acceptance, loss, prepare
from dspark_jax.train.objective import blocks as pack_blocks
from dspark_jax.train.optim import keep_buffers, optimizer
from dspark_jax.train.teacher import teacher_states
from dspark_jax.types import Array, PyTree


class TrainState(flax.struct.PyTreeNode):
    """Enough to resume bit for bit."""

    step: Array  # [] int32 steps taken, of ``rounds`` updates each
    params: PyTree
    opt_state: PyTree
    key: Array  # base key; the key of a step is folded from it
    cursor: Array  # [] int32: the next record
    positions: Array  # [] float32: slots that counted in the loss so far
    skipped: Array  # [] int32: updates in a row whose loss or gradient was not finite


def init_state(params: PyTree, optim: OptimConfig, seed: int, *, cursor: int = 0, positions: int = 0) -> TrainState:
    """The state before the first step; ``cursor``: records passed over, ``positions``: seen before this run."""

    def zero() -> Array:  # each its own buffer: the state is donated
        return jnp.array(0, jnp.int32, copy=True)

    return TrainState(
        step=zero(),
        params=params,
        opt_state=optimizer(optim, 0.0).init(params),
        key=jax.random.key_data(jax.random.key(seed)),
        cursor=jnp.array(cursor, jnp.int32, copy=True),
        positions=jnp.array(positions, jnp.float32, copy=True),
        skipped=zero(),
    )


@functools.lru_cache(maxsize=8)
def make_train_step(
    config: DrafterConfig, plan: BlockPlan, rounds: int, settings: LossConfig, optim: OptimConfig
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """``step(state, frozen, tokens [B, L], loss_mask [B, L], rate [], states=None) -> (state, metrics)``; the state is
    donated.

    The target reads the text once, or not at all where its ``states`` are given (``objective.prepare``); then
    ``rounds`` updates follow, each on ``plan``'s blocks of every sequence. The learning rate is an argument; of
    ``optim`` only what makes another program is read. Equal arguments give the same compiled function.
    """

    def update(state: TrainState, frozen: Frozen, lesson: Lesson, blocks: Any, rate: Array) -> tuple[TrainState, Any]:
        slots = pack_blocks(config, plan, lesson, *blocks)

        def objective(params: PyTree) -> tuple[Array, Any]:
            if settings.bfloat16:  # inside, so that gradients come back in float32
                params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            value, length = loss(config, settings, frozen, plan, params, lesson, slots)
            return value.total, (value, length)

        (total, (terms, length)), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
        norm = optax.tree.norm(gradient)
        updates, opt_state = optimizer(optim, rate).update(gradient, state.opt_state, state.params)
        good = jnp.isfinite(total) & jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (optax.apply_updates(state.params, keep_buffers(updates)), opt_state),
            (state.params, state.opt_state),
        )
        state = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            positions=state.positions + jnp.sum(slots.mask),
            skipped=jnp.where(good, 0, state.skipped + 1),
        )
        pairs = {"ce": terms.ce, "l1": terms.l1, "confidence": terms.confidence, "tau": length}
        return state, {"total": total, "grad_norm": norm, **pairs}

    def step(
        state: TrainState, frozen: Frozen, tokens: Array, loss_mask: Array, rate: Array, states: Any = None
    ) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        lesson = jax.lax.stop_gradient(prepare(config, frozen, tokens, loss_mask, settings.chunks, states))
        drawn = sample_anchors(key, loss_mask, plan.anchors * rounds)
        # Sequences with too few anchors lack the last ones: dealt out in turn, every round lacks its share.
        shares = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, rounds).transpose(2, 0, 1), drawn)
        state, metrics = jax.lax.scan(lambda s, blocks: update(s, frozen, lesson, blocks, rate), state, shares)
        state = dataclasses.replace(state, step=state.step + 1, cursor=state.cursor + tokens.shape[0])
        return state, metrics

    return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=8)
def make_heldout_step(
    config: DrafterConfig, plan: BlockPlan, chunks: int = 0
) -> Callable[[PyTree, Frozen, Array, Array, Array], dict[str, Array]]:
    """``measure(params, frozen, key, tokens, loss_mask) -> objective.acceptance``."""

    def measure(params: PyTree, frozen: Frozen, key: Array, tokens: Array, loss_mask: Array) -> dict[str, Array]:
        lesson = prepare(config, frozen, tokens, loss_mask, chunks)
        slots = pack_blocks(config, plan, lesson, *sample_anchors(key, loss_mask, plan.anchors))
        return acceptance(config, frozen, plan, params, lesson, slots, chunks)

    return jax.jit(measure)


@functools.lru_cache(maxsize=8)
def make_teacher_step(taps: tuple[int, ...]) -> Callable[[Target, Array], tuple[Array, Array]]:
    """``step(target, tokens [B, L]) -> teacher_states``."""
    return jax.jit(functools.partial(teacher_states, taps=taps))


def make_bigram_step(rule: optax.GradientTransformation) -> Callable[..., tuple[tuple[Array, Array], Any]]:
    """``step((w1 [M, r], w2 [Vd, r]), state, rows [N], law [N, Vd]) -> (tables, state)``: one update of a low-rank
    bigram table on the cross entropy of ``softmax(w2 w1[row])`` against each row's law."""

    def step(tables: tuple[Array, Array], state: Any, rows: Array, law: Array) -> tuple[tuple[Array, Array], Any]:
        def objective(tables: tuple[Array, Array]) -> Array:
            log_q = jax.nn.log_softmax(linear(tables[1], tables[0][rows]), axis=-1)
            return -jnp.mean(jnp.sum(law * log_q, axis=-1))

        updates, state = rule.update(jax.grad(objective)(tables), state)
        return optax.apply_updates(tables, updates), state

    return jax.jit(step, donate_argnums=(0, 1))
