"""What holds for every chain, driven by the tests of each kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.layout import dense_layout, ragged_layout
from tests.drafters.chain_cases import Argmax, Tiny
from tests.drafters.reference import ChainReference

PIECE, SLOTS, CELLS = 4, 3, 24
LENGTHS = (7, 5)  # tokens of the prompts of slots 1 and 2, run in pieces
VERIFIED = (3, 2)  # tokens of the next forward, of which
KEPT = (2, 1)  # so many stay


def absorbed(drafter: Any, seed: int = 0) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """A drafter's state after prompts in pieces and one verification that rejects drafts, all rows in one ragged
    forward; with the features ``[n, m * d]`` and tokens ``[n + 1]`` that stayed (the last token is the anchor)."""
    rng = np.random.default_rng(seed)
    decoder = drafter.config.decoder
    width = len(drafter.taps) * decoder.hidden_size
    totals = [a + b for a, b in zip(LENGTHS, VERIFIED, strict=True)]
    features = [rng.normal(size=(n, width)) * np.linspace(0.5, 2.0, width) for n in totals]
    tokens = [rng.integers(0, decoder.vocab_size, n + 1) for n in totals]
    state = drafter.init(SLOTS, CELLS)

    def absorb(state: Any, layout: Any, parts: list[tuple[int, slice]], kept: Any) -> Any:
        flat_features = np.full((layout.row.shape[0], width), 9.0)  # what pads the flat tokens is read by nobody
        flat_tokens, begin = np.zeros(layout.row.shape[0], np.int32), 0
        for row, part in parts:
            n = len(tokens[row][:-1][part])
            flat_features[begin : begin + n] = features[row][part]
            flat_tokens[begin : begin + n] = tokens[row][:-1][part]
            begin += n
        arrays = jnp.asarray(flat_features, drafter.shared.embed.dtype), layout, jnp.asarray(flat_tokens)
        return drafter.absorb(state, *arrays, jnp.asarray(kept, jnp.int32))

    for row, length in enumerate(LENGTHS):
        for start in range(0, length, PIECE):
            count = min(PIECE, length - start)
            layout = dense_layout(jnp.array([start]), jnp.array([count]), PIECE, row + 1)
            state = absorb(state, layout, [(row, slice(start, start + count))], [count])
    starts, counts = jnp.array([0, *LENGTHS]), jnp.array([0, *VERIFIED])  # slot 0 takes no part
    layout = ragged_layout(starts, counts, PIECE, sum(VERIFIED) + 1)
    state = absorb(state, layout, [(r, slice(n, None)) for r, n in enumerate(LENGTHS)], [0, *KEPT])
    ends = [a + b for a, b in zip(LENGTHS, KEPT, strict=True)]
    return (
        state,
        [x[:n] for x, n in zip(features, ends, strict=True)],
        [t[: n + 1] for t, n in zip(tokens, ends, strict=True)],
    )


def check_against_definition(tiny: Tiny, drafts: int = 3) -> None:
    """Drafts, their logits and the states behind them equal the NumPy model's to 1e-9 (float64 only)."""
    drafter: Any = tiny.drafter
    reference = ChainReference(drafter.config, tiny.params, drafter.shared)
    with jax.disable_jit():  # op by op: nothing is compiled for one small case
        state, features, tokens = absorbed(drafter)
        anchor = jnp.asarray([0, *(t[-1] for t in tokens)], jnp.int32)
        length = jnp.asarray([0, *(len(f) for f in features)], jnp.int32)
        proposal, states = drafter.walk(state, anchor, length, drafts, Argmax(drafter.d2t), context=CELLS - 4)
    for row in range(2):
        logits, expected, drafted = reference.steps(features[row], tokens[row], drafts)
        np.testing.assert_array_equal(proposal.tokens[row + 1], drafted)
        np.testing.assert_allclose(proposal.base[:, row + 1], logits, atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(states[row + 1], expected, atol=1e-9, rtol=1e-9)
