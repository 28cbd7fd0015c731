"""The gated feed-forward branch."""

from __future__ import annotations

from collections.abc import Callable

import jax

from dspark_jax.nn.linear import linear
from dspark_jax.types import Array, PyTree

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def gated_mlp(params: PyTree, x: Array, activation: str) -> Array:
    """``down(act(gate(x)) * up(x))`` on flat tokens ``[T, d]``."""
    act = ACTIVATIONS[activation]
    if "gate_up_proj" in params:
        both = linear(params["gate_up_proj"], x, params.get("gate_up_bias"))
        gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    else:
        gate = linear(params["gate_proj"], x, params.get("gate_bias"))
        up = linear(params["up_proj"], x, params.get("up_bias"))
    return linear(params["down_proj"], act(gate) * up, params.get("down_bias"))
