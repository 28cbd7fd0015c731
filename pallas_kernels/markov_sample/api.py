"""Draws a block of drafts with the sequential head (paper section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.markov_sample import mosaic_gpu, reference, tpu, triton_gpu
from pallas_kernels.markov_sample.spec import Array, Block, Head, Sampled, confidence_logits, markov_input, scale

StepFn = Callable[..., tuple[Array, Array, Array]]


def backend(
    head: Head,
    block: Block,
    *,
    implementation: str | None = None,
    interpret: Any = None,
    aot: bool = False,
    spread: bool = False,
) -> str:
    """The backend that ``markov_sample`` would run. ``spread``: the arguments live on several devices."""
    refusals = {
        "mosaic_gpu": mosaic_gpu.refuses(head, block),
        "triton": triton_gpu.refuses(head, block, interpret),
        "tpu": tpu.refuses(head, block),
    }
    ready = interpret is not None
    return choose("markov_sample", implementation, refusals, interpret=ready, aot=aot, spread=spread)


def markov_sample(
    head: Head, block: Block, *, implementation: str | None = None, interpret: Any = None, aot: bool = False
) -> Sampled:
    """Draws the G tokens of a block one after the other: logits = base + W2 z(W1[token before]), Gumbel-max.

    The noise of a token is that of its target id under its place's key, so every backend, any tiling of the
    vocabulary and a trimmed draft vocabulary use the same number. Filters (top-k, top-p, min-p) are not applied:
    rows that ask for them need the whole row and take the plain path of the decoding library.

    Args:
        implementation: None (by device, else XLA), ``xla``, ``mosaic_gpu`` (Hopper), ``triton`` (Ampere to Hopper,
            jax-triton installed) or ``tpu``.
        interpret: parameters of the backend's interpreter, to run its kernel on a CPU; ``triton``: see
            ``triton_call.call``.
        aot: the program is compiled for a device that is not here.

    Returns:
        ``Sampled``; its ``log_q`` and ``row_log_q`` are of one float32 distribution.

    Raises:
        BackendError: the named backend cannot run this.
    """
    name = backend(head, block, implementation=implementation, interpret=interpret, aot=aot)
    if name == "xla":
        step: StepFn = reference.make_step(head, block)
    elif name == "mosaic_gpu":
        step = mosaic_gpu.make_step(head, block, interpret)
    elif name == "triton":
        step = triton_gpu.make_step(head, block, interpret)
    else:
        step = tpu.make_step(head, block, interpret)
    return _scan(head, block, step)


def _scan(head: Head, block: Block, step: StepFn) -> Sampled:
    """The loop over places. ``step(k, z, inverse, greedy) -> (index [B], log_q [B], lse [B])`` is the backend's."""
    places, rows, _ = block.base.shape
    inverse, greedy = scale(block.temperature)
    kind = head.kind
    rank = 0 if head.w1 is None else head.w1.shape[1]
    dtype = block.hidden.dtype

    def place(carry: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        previous, state = carry
        e = z = jnp.zeros((rows, 0), dtype)
        if kind != "none":
            e = head.w1[previous]  # type: ignore[index]
            z, state = markov_input(head, state, e, block.hidden[k])
        index, log_q, lse = step(k, z, inverse, greedy)
        token = index if block.ids is None else block.ids[index]
        return (token, state), (token, index, log_q, lse, z, e)

    carry = (block.anchor.astype(jnp.int32), jnp.zeros((rows, rank), dtype))
    _, (tokens, index, log_q, lse, z, e) = jax.lax.scan(place, carry, jnp.arange(places))
    has_head = kind != "none"
    confidence = confidence_logits(head, block.hidden, e)
    return Sampled(tokens, index, log_q, lse, z if has_head else None, confidence)
