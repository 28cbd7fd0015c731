"""Attention of flat tokens against the slot caches of their requests."""

from __future__ import annotations

from typing import Any

from pallas_kernels.dispatch import choose
from pallas_kernels.slot_attention import mosaic_gpu, reference, tpu
from pallas_kernels.slot_attention.spec import Array, Cells, Own, Tokens


def backend(
    q: Array,
    tokens: Tokens,
    cells: Cells,
    own: Own | None = None,
    *,
    implementation: str | None = None,
    interpret: Any = None,
    spread: bool = False,
) -> str:
    """The backend that ``slot_attention`` would run. ``spread``: the arguments live on several devices."""
    refusals = {"mosaic_gpu": mosaic_gpu.refuses(q, tokens, cells, own), "tpu": tpu.refuses(q, tokens, cells, own)}
    if interpret is not None and refusals["tpu"] is None:
        refusals["tpu"] = "jax's ragged paged attention cannot be interpreted"
    if implementation is None:
        del refusals["tpu"]  # it re-lays the cells: only who names it wants that
    return choose("slot_attention", implementation, refusals, interpret=interpret is not None, spread=spread)


def slot_attention(
    q: Array,
    tokens: Tokens,
    cells: Cells,
    own: Own | None = None,
    *,
    scale: float,
    window: int = 0,
    context: int | None = None,
    implementation: str | None = None,
    interpret: Any = None,
) -> Array:
    """Softmax attention ``[T, H, D]`` of ``q [T, H, D]``, head h reading key/value head ``h // (H / Hk)``.

    Verification and prefill: the block's keys are in the cells already and a token sees up to its own position. With
    ``own`` (a draft block) it sees all cells before the block, and the whole block in both directions.

    Args:
        scale: factor of the scores. window: positions a token sees, its own included; 0: all.
        context: cells of a slot that are read at most (static); None: all. ``start + W <= context`` is the
            caller's duty.
        implementation: None (by device, else XLA), ``xla``, ``mosaic_gpu`` (Hopper, bfloat16) or ``tpu`` (see there).
        interpret: parameters of the backend's interpreter.

    Returns:
        rows of tokens past their request's count are garbage, but finite.

    Raises:
        BackendError: the named backend cannot run this.
    """
    context = cells.k.shape[-2] if context is None else min(context, cells.k.shape[-2])
    name = backend(q, tokens, cells, own, implementation=implementation, interpret=interpret)
    if name == "mosaic_gpu":
        return mosaic_gpu.slot_attention(
            q, tokens, cells, own, scale=scale, window=window, context=context, interpret=interpret
        )
    if name == "tpu":
        return tpu.slot_attention(q, tokens, cells, scale=scale, window=window, context=context)
    return reference.slot_attention(q, tokens, cells, own, scale=scale, window=window, context=context)
