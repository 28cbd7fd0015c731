"""One training step of the reference's cases in full view: states, masks, loss terms, gradients.

The step is the trainer's own (``train/objective.py``); here its inside is shown under the reference's keys. Target
states are computed, not read. EAGLE-3 trains on every position of a text at once: chains behind all anchors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.packing import BlockPlan, Slots, pack
from dspark_jax.drafters import drafter_specs
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.evaluate.rounds import Arrays, Models
from dspark_jax.nn.block import split_projections
from dspark_jax.nn.norm import rms_norm
from dspark_jax.params import is_spec
from dspark_jax.train.block_forward import context_visible, packed_heads, packed_hidden
from dspark_jax.train.chain_forward import chain_states, step_tokens
from dspark_jax.train.config import LossConfig
from dspark_jax.train.loss import EPSILON, Loss, combine, position_weights, slot_terms
from dspark_jax.train.objective import Frozen, rows_of
from dspark_jax.train.teacher import teacher_states
from dspark_jax.types import Array, PyTree

TRAINING_INPUTS = (
    "input_ids", "attention_mask", "loss_mask", "anchors", "block_keep_mask", "pick_batch", "pick_pos",
    "grad_norm_names",
)  # fmt: skip
"""What is read of a case's ``train.`` arrays."""

GRADIENT = "train.grad."


def loss_settings(spec: Mapping[str, Any]) -> LossConfig:
    """The loss of a ``case.json``: weights and decay of blocks, or the factor from step to step of a chain."""
    if "step_loss_decay" in spec:
        return LossConfig((1.0, 0.0, 0.0), decay=-1 / math.log(float(spec["step_loss_decay"])), soft=True)
    given = spec.get("loss") or {}
    names = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
    weights = tuple(float(given.get(name, default)) for name, default in zip(names, LossConfig.weights, strict=True))
    return LossConfig(weights, decay=float(given.get("loss_decay_gamma", LossConfig.decay)))


def training_arrays(models: Models, settings: LossConfig, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """All ``train.`` arrays of a case; none where it has no training batch."""
    given = {name: inputs[f"train.{name}"] for name in TRAINING_INPUTS if f"train.{name}" in inputs}
    if "input_ids" not in given:
        return {}
    run: Callable[..., Any] = _chain_step if models.drafter.config.chain else _block_step
    fixed = {name: jnp.asarray(x) for name, x in given.items() if name != "grad_norm_names"}
    found, gradient = _step(run, models, settings, fixed)
    out = {**given, **{name: np.asarray(value) for name, value in found.items()}}
    specs = jax.tree.leaves(drafter_specs(models.drafter.config), is_leaf=is_spec)
    named = {spec.name: np.asarray(g) for spec, g in zip(specs, jax.tree.leaves(gradient), strict=True)}
    norms = np.asarray([np.linalg.norm(named[str(name)]) for name in given["grad_norm_names"]])
    out |= {"grad_norms": norms, "grad_norm_total": np.asarray(np.linalg.norm(norms))}
    wanted = [str(name) for name in inputs.get("train.grads", ())]
    return {f"train.{name}": value for name, value in out.items()} | {
        name: named[name.removeprefix(GRADIENT)] for name in wanted
    }


def _step(
    run: Callable[..., Any], models: Models, settings: LossConfig, given: dict[str, Array]
) -> tuple[dict[str, Array], PyTree]:
    """(arrays, gradient of the drafter's parameters, one leaf a tensor of the checkpoint)."""
    drafter = models.drafter
    decoder = drafter.config.decoder
    layers = zip(decoder.layers, drafter.params["layers"], strict=True)
    params = {**drafter.params, "layers": [split_projections(decoder, *pair) for pair in layers]}

    @jax.jit
    def both(params: PyTree, models: tuple[Any, Any], given: dict[str, Array]) -> Any:
        target, drafter = models
        frozen = Frozen.build(target, None).replace(shared=drafter.shared)
        real = given["attention_mask"][..., None] > 0
        final, features = (jnp.where(real, x, 0) for x in teacher_states(target, given["input_ids"], drafter.taps))

        def total(params: PyTree) -> tuple[Array, dict[str, Array]]:
            value, out = run(drafter.config, settings, frozen, params, (final, features), given)
            return value, {**out, "total_loss": value}

        (_, out), gradient = jax.value_and_grad(total, has_aux=True)(params)
        return {**out, "target_hidden_states": features, "target_last_hidden_states": final}, gradient

    result: tuple[dict[str, Array], PyTree] = both(params, (models.target, drafter), given)
    return result


# ---- EAGLE-3 ---------------------------------------------------------------------------------------------------


def _chain_step(
    config: Any, settings: LossConfig, frozen: Frozen, params: PyTree, states: tuple[Array, Array], given: Any
) -> tuple[Array, dict[str, Array]]:
    """Step s of position i is step s of the chain behind anchor i + 1."""
    final, features = states
    tokens, steps = given["input_ids"], config.block_size
    batch, length = tokens.shape
    column, real = jnp.arange(length)[None, :], jnp.sum(given["attention_mask"], axis=1, keepdims=True)
    anchors, k = jnp.broadcast_to(column + 1, (batch, length)), jnp.arange(steps)[None, None, :]
    live = column[:, :, None] + k < real[:, :, None]
    hidden = chain_states(config, params, frozen.shared, features, tokens, anchors, steps, live)
    logits = base_logits(config, frozen.shared, rms_norm(hidden, params["norm"], config.decoder.rms_norm_eps))
    # Behind the end the target says nothing: zero states, equal probabilities.
    padded = jnp.pad(final, ((0, 0), (0, steps), (0, 0)))
    rows = rows_of(padded, (anchors[:, :, None] + k).reshape(batch, -1))
    probs = frozen.head(rows.reshape(-1, rows.shape[-1]))[0].reshape(logits.shape)
    learnt = (given["loss_mask"] > 0) & (column < real - 1)
    valid = jnp.pad(learnt, ((0, 0), (0, steps)))[:, column[0][:, None] + k[0]]
    decay = position_weights(k, settings.decay, logits.dtype)
    labels = jnp.zeros_like(valid, jnp.int32)

    def terms(weights: Array) -> Any:
        return slot_terms(logits, probs, None, labels, None, None, weights, soft=settings.soft)

    normalizer = batch * length  # of all positions, padding included
    each = jax.vmap(lambda s: terms(jnp.where(valid & (k == s), 1.0, 0.0)).ce[0])(jnp.arange(steps)) / normalizer
    found = terms(jnp.where(valid, decay, 0))
    agree = jnp.argmax(logits, axis=-1) == jnp.argmax(probs, axis=-1)
    by_step = {
        "step_input_ids": step_tokens(tokens, anchors, steps),
        "step_hidden": hidden,
        "step_valid_mask": valid,
        "step_correct": agree & valid,
        "step_accept_rate": jnp.where(valid, found.rate, 0),
        "step_target_argmax": jnp.argmax(probs, axis=-1),
        "pick_draft_logits": logits,
        "pick_target_probs": probs,
    }
    out = {name: jnp.moveaxis(x, 2, 0) for name, x in by_step.items()}
    for name in ("pick_draft_logits", "pick_target_probs"):
        out[name] = out[name][:, given["pick_batch"], given["pick_pos"]]
    out |= {
        "step_loss": each,
        "step_normalizer": jnp.full(steps, float(normalizer)),
        "step_weight": decay[0, 0],
    }
    return found.ce[0] / normalizer, out


# ---- DSpark and DFlash -----------------------------------------------------------------------------------------


def _block_step(
    config: Any, settings: LossConfig, frozen: Frozen, params: PyTree, states: tuple[Array, Array], given: Any
) -> tuple[Array, dict[str, Array]]:
    """Blocks of full width behind the given anchors."""
    final, features = states
    anchors, keep = given["anchors"], given["block_keep_mask"]
    batch, count = anchors.shape
    plan = BlockPlan((config.block_size,) * count)
    slots = pack(plan, anchors, keep, given["input_ids"], given["loss_mask"] > 0, config.mask_token_id)
    hidden = packed_hidden(config, params, frozen.shared, features, plan, slots)
    logits, confidence = packed_heads(config, params, frozen.shared, plan, slots, hidden)
    rows = rows_of(final, slots.row)
    aligned = frozen.head.logits(frozen.head.inside, rows.reshape(-1, rows.shape[-1])).reshape(logits.shape)
    probs = jax.nn.softmax(aligned, axis=-1)
    decay = position_weights(jnp.asarray(plan.offset)[None, :], settings.decay, logits.dtype)
    weights = jnp.where(slots.mask, decay, 0)
    terms = slot_terms(logits, probs, None, slots.labels, None, confidence, weights)
    a, b, c = settings.weights
    loss = combine(terms.ce, terms.l1, terms.confidence, (a, b, c if confidence is not None else 0.0))
    by_slot = {
        "block_hidden": hidden,
        "draft_logits": logits,
        "target_ids": slots.labels,
        "eval_mask": slots.mask,
        "aligned_target_logits": aligned,
        "accept_rate": terms.rate,
        "loss_weights": weights,
    }
    if confidence is not None:
        by_slot["confidence_pred"] = confidence
    shape = (batch, count, config.block_size)
    out = {name: x.reshape(*shape, *x.shape[2:]) for name, x in by_slot.items()}
    out |= _masks(plan, slots, features.shape[1], config.decoder.layers[0].window)
    out |= _terms(loss, confidence is not None)
    return loss.total, {**out, "alphas": jnp.asarray(settings.weights), "loss_decay_gamma": jnp.asarray(settings.decay)}


def _masks(plan: BlockPlan, slots: Slots, length: int, window: int) -> dict[str, Array]:
    """Positions ``[B, L + T]`` and who sees whom, ``[B, T, L + T]``: context, then blocks."""
    context = jnp.broadcast_to(jnp.arange(length)[None, :], (slots.position.shape[0], length))
    block = jnp.asarray(plan.block)
    seen = context_visible(slots.anchors[:, block], slots.position, length, window)
    own = jnp.broadcast_to((block[:, None] == block[None, :])[None], (*seen.shape[:2], plan.slots))
    kept = slots.keep[:, block, None]
    return {
        "position_ids": jnp.concatenate([context, slots.position], axis=1),
        "attention_mask_dense": jnp.concatenate([seen, own], axis=2) & kept,
    }


def _terms(loss: Loss, with_confidence: bool) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for name in ("ce", "l1", *(("confidence",) if with_confidence else ())):
        above, below = getattr(loss, name)
        out |= {f"{name}_num": above, f"{name}_den": below, f"{name}_loss": above / (below + EPSILON)}
    return out
