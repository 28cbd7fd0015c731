"""Shape legend, the EMPTY token and small checks shared by every room.

Shapes are written with one letter an axis, everywhere:

    S  slots (requests that can run at once)      B  rows of a batch handed to ``generate``
    L  cache length, in tokens                    P  prompt length, padded
    G  block size (draft tokens a block)          W  block width in a forward: anchor + drafts, at most G + 1
    T  flattened tokens of one forward            R  rows of a forward (the slots that take part in it)
    V  target vocabulary                          Vd draft vocabulary
    d  hidden size    m  tapped layers            H, Hk, D  query heads, key/value heads, head size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any

EMPTY = -1
"""Marks a place in a token array that holds no token."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one decode greedily (temperature 0)."""


def accumulate_dtype(dtype: Any) -> jnp.dtype:
    """The dtype in which norms, softmax and logits are computed: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def concrete(x: Any) -> np.ndarray | None:
    """``x`` as a numpy array, or None while it is traced (its values are then unknown and cannot be checked)."""
    if isinstance(x, jax.core.Tracer):
        return None
    return np.asarray(x)


class Opaque:
    """Carries a Python object (a tokenizer) through a pytree as static data, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value is self.value


def cond(predicate: Array, true: Callable[..., Any], false: Callable[..., Any], *operands: Any) -> Any:
    """``lax.cond``; outside of a trace a plain ``if``, so that scripted noise sees concrete values."""
    if isinstance(predicate, jax.core.Tracer):
        return jax.lax.cond(predicate, true, false, *operands)
    return true(*operands) if bool(predicate) else false(*operands)
