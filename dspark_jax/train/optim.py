"""AdamW, gradient clipping and learning-rate schedules; ``cosine`` reproduces the reference step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dspark_jax.train.config import OptimConfig
from dspark_jax.types import Array

Schedule = Callable[[Any], Array]


def schedule(config: OptimConfig) -> Schedule:
    """Learning rate of step t (0-based).

    ``cosine``: warm-up ``lr (t + 1) / w``, then a cosine that is scaled to end, not begin, on the reference's
    grid: the first rate behind the warm-up lies a little above ``lr``. ``wsd``: warm-up, constant, and a linear
    decay to zero in the last ``decay_steps`` of ``total_steps``; ``total_steps`` may be changed while the rate is
    constant, which is what a run on borrowed time needs.
    """
    lr, warm, total = config.learning_rate, config.warmup_steps, config.total_steps

    def warmed(t: Any, after: Array) -> Array:
        if not warm:
            return after
        return jnp.where(t < warm, lr * (t + 1.0) / warm, after)

    def cosine(t: Any) -> Array:
        span = max(total - warm, 1)
        peak = 1 + math.cos(math.pi / span)
        if peak == 0:  # a single step behind the warm-up
            return warmed(t, jnp.asarray(lr))
        return warmed(t, lr * (1 + jnp.cos(math.pi * (t - warm) / span)) / peak)

    def wsd(t: Any) -> Array:
        left = (total - t) / max(config.decay_steps, 1)
        return warmed(t, lr * jnp.clip(left, 0.0, 1.0))

    return {"cosine": cosine, "wsd": wsd}[config.schedule]


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Gradients times ``min(1, limit / (norm + 1e-6))``, the reference's rule; optax has no such denominator."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, limit / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def keep_buffers(updates: Any) -> Any:
    """Updates that leave the stored buffers of a drafter (Gemma's ``layer_scalar``) alone: no decay either."""

    def kept(path: Any, update: Array) -> Array:
        return jnp.zeros_like(update) if getattr(path[-1], "key", None) == "layer_scalar" else update

    return jax.tree_util.tree_map_with_path(kept, updates)


def optimizer(config: OptimConfig, rate: Any) -> optax.GradientTransformation:
    """Clipping, then AdamW with decoupled weight decay, at the learning rate ``rate``.

    The rate comes from outside (``schedule``), so that a changed end of a run is no new program.
    """
    adamw = optax.adamw(
        lambda count: rate, b1=config.beta1, b2=config.beta2, eps=1e-8, weight_decay=config.weight_decay
    )
    steps = [clip_by_global_norm(config.max_grad_norm), adamw]
    if config.ema_decay:  # without it the state has no place for it: old checkpoints fit
        steps.append(parameter_mean(config.ema_decay))
    return optax.chain(*steps)


class MeanState(NamedTuple):
    """Running mean of the parameters."""

    mean: Any


def parameter_mean(decay: float) -> optax.GradientTransformation:
    """Leaves updates alone and follows the parameters they lead to: mean = decay * mean + (1 - decay) * new."""

    def init(params: Any) -> MeanState:
        return MeanState(jax.tree.map(lambda p: jnp.array(p, copy=True), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MeanState]:
        new = optax.apply_updates(params, keep_buffers(updates))
        return updates, MeanState(jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, state.mean, new))

    return optax.GradientTransformation(init, update)


def averaged(params: Any, opt_state: Any) -> Any:
    """The running mean where there is one, else the parameters."""
    return next((part.mean for part in opt_state if isinstance(part, MeanState)), params)
