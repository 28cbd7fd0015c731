"""Records of full blocks from real decoding: confidence logits, accepted prefix, and how far draft and target agree.

The host drives the cycle of ``cycle.py`` over a batch of prompts, every draft verified. B rows, G drafts a block, N
blocks.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState, Static
from dspark_jax.cycle_draws import draft_law
from dspark_jax.generate import prefill_rows, start_rows
from dspark_jax.layout import Layout
from dspark_jax.types import EMPTY, Array
from dspark_jax.whole_file import write_whole


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks that were verified in full and not ended by a stop token."""

    confidence: np.ndarray  # [N, G] float32 logits
    accepted: np.ndarray  # [N] int32 drafts accepted
    overlap: np.ndarray  # [N, G] float32: 1 - TV of draft and target behind the block's own drafts
    prompt: np.ndarray  # [N] int32

    @property
    def labels(self) -> np.ndarray:
        """``[N, G]`` 1 where drafts 1..k were all accepted, as ``sts.fit`` wants them."""
        return (self.accepted[:, None] > np.arange(self.confidence.shape[1])).astype(np.float64)

    def __len__(self) -> int:
        return len(self.accepted)

    @classmethod
    def join(cls, parts: Sequence[Blocks]) -> Blocks:
        """All blocks of several records, at least one record."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(cls)})

    def save(self, path: Path) -> None:
        """Writes an ``.npz`` that is whole or not there at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.savez_compressed(content, **dataclasses.asdict(self))
        write_whole(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Blocks:
        """Reads what ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(**{field.name: arrays[field.name] for field in dataclasses.fields(cls)})


class Recorder:
    """Decodes batches of B prompts with a drafter, and keeps what calibration needs.

    Raises ValueError for a drafter without a confidence head.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        *,
        sampling: Sampling,
        verification: str,
        max_new_tokens: int,
        longest: int,
        stop_ids: Sequence[int] = (),
        static: Static | None = None,
    ) -> None:
        """``longest``: tokens of the longest prompt; shorter ones share its programs."""
        if not drafter.has_confidence:
            raise ValueError("calibration needs a drafter with a confidence head; this one has none")
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.coupled, self.max_new_tokens, self.longest = verification == "coupled", max_new_tokens, longest
        self._stops = jnp.asarray(tuple(stop_ids) or (EMPTY,), jnp.int32)
        static = Static() if static is None else static
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "coupled": self.coupled,
            "static": static,
        }
        self._open = jax.jit(partial(_open, **options))
        self._turn = jax.jit(partial(_turn, static=static), donate_argnums=2)

    def batch(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], first: int = 0) -> tuple[Blocks, int]:
        """Decodes prompts to their end.

        Args:
            first: number of the first prompt, for ``Blocks.prompt``.

        Returns:
            the blocks, and the tokens that were made.
        """
        rows = len(prompts)
        padded = np.zeros((rows, self.longest), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
        state = self._open(
            self.target, self.drafter, jnp.asarray(padded), lengths, jnp.asarray(seeds, jnp.uint32), self._stops
        )
        parts, tokens = [], rows
        while bool(state.active.any()):
            state, seen = self._turn(self.target, self.drafter, state)
            out = {name: np.asarray(value) for name, value in seen.items()}
            tokens += int(out["count"].sum())
            good = out["whole"]
            parts.append(
                Blocks(
                    out["confidence"][good], out["accepted"][good], out["overlap"][good], first + np.flatnonzero(good)
                )
            )
        empty = np.zeros((0, self.drafter.block_size), np.float32)
        parts.append(Blocks(empty, np.zeros(0, np.int32), empty, np.zeros(0, np.int64)))
        return Blocks.join(parts), tokens


def _open(
    target: Any,
    drafter: Any,
    prompts: Array,
    lengths: Array,
    seeds: Array,
    stop_ids: Array,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    coupled: bool,
    static: Static,
) -> DecodeState:
    state = start_rows(
        target,
        drafter,
        prompts,
        seeds,
        stop_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        coupled=coupled,
        width=drafter.block_size + 1,
    )
    return prefill_rows(target, drafter, state, prompts, lengths, static)[0]


def _turn(target: Any, drafter: Any, state: DecodeState, *, static: Static) -> tuple[DecodeState, dict[str, Array]]:
    """One cycle with whole blocks, and what it showed."""
    drafts, active = drafter.block_size, state.active
    proposal = cycle.draft(drafter, state, num_drafts=drafts, static=static)
    laws = [draft_law(drafter, state, proposal, jnp.full(active.shape, k), static) for k in range(drafts)]
    room = cycle.window_limit(state, target.max_positions)
    admitted = jnp.minimum(jnp.full(active.shape, drafts, jnp.int32), room)
    state, result, log_p, layout = cycle.step_with_law(target, drafter, state, proposal, admitted, static=static)
    confidence: Any = proposal.confidence_logits  # there, as ``Recorder`` has seen to
    seen = {
        "confidence": confidence.astype(jnp.float32),
        "accepted": result.accepted,
        "overlap": overlap(log_p, layout, laws, drafter.d2t),
        "count": result.count,
        "whole": active & (admitted == drafts) & ~result.stopped,
    }
    return state, seen


def overlap(log_p: Array, layout: Layout, log_q: Sequence[Array], d2t: Array | None) -> Array:
    """``[R, G]``: 1 - TV, the sum over tokens of min(p, q), of each draft's two distributions.

    Args:
        log_p: ``[T, V]``, flat; the row at place k of a block belongs to draft k. log_q: ``[R, Vd]`` of each draft.
    """
    columns = []
    for k, row in enumerate(log_q):
        p = log_p[layout.index[:, k]]
        p = p if d2t is None else p[:, d2t]
        columns.append(jnp.sum(jnp.exp(jnp.minimum(p, row.astype(p.dtype))), axis=-1))
    return jnp.stack(columns, axis=1).astype(jnp.float32)
