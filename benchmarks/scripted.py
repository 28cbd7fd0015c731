"""A random model whose drafts are accepted as recorded: every forward is run in full, what it finds is overruled.

A model of random weights accepts next to nothing, so its speed under load would say nothing. Here the drafter's
confidences and the target's verdicts come from a trace of blocks (confidence and acceptance of each position, of a
real drafter): block n of the trace for a request at position p, n a hash of slot and p. The target's logits are raised
at the drafted token where the trace accepts it, and lowered where it does not, so the engine's own verification decides
as it always does. Figures made with it are marked "scripted acceptance".
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters import Drafter
from dspark_jax.layout import Layout
from dspark_jax.noise import mix
from dspark_jax.targets import Target
from dspark_jax.types import Array

MARK = "scripted acceptance"
_FORCED = 1e4
_BYTES = 3  # of a token id; bfloat16 holds integers up to 256 exactly


class Trace(flax.struct.PyTreeNode):
    """Blocks of a real drafter: survival by the confidence head, and which drafts the target accepted."""

    confidence: Array  # [N, G] logits of conditional acceptance
    accepted: Array  # [N, G] bool, rows non-increasing

    def block(self, slot: Array, position: Array) -> Array:
        """``[R]``: the block that stands for a request's cycle."""
        words = mix(mix(slot.astype(jnp.uint32) + jnp.uint32(1)) ^ position.astype(jnp.uint32))
        return (words % jnp.uint32(self.accepted.shape[0])).astype(jnp.int32)


def made_up(blocks: int, block: int, rate: float = 0.8, seed: int = 0) -> Trace:
    """A trace where none was recorded: conditional acceptances around ``rate``, calibrated confidences."""
    rng = np.random.default_rng(seed)
    logits = np.log(rate / (1 - rate)) + rng.normal(size=(blocks, 1)) + 0.7 * rng.normal(size=(blocks, block))
    kept = rng.random((blocks, block)) < 1 / (1 + np.exp(-logits))
    return Trace(jnp.asarray(logits, jnp.float32), jnp.asarray(np.cumprod(kept, axis=1).astype(bool)))


class ScriptedTarget(flax.struct.PyTreeNode):
    """A target with scripted verdicts; everything else is the real one's."""

    real: Target
    trace: Trace

    @property
    def max_positions(self) -> int:
        return self.real.max_positions

    @property
    def vocab_size(self) -> int:
        return self.real.vocab_size

    def init_cache(self, slots: int, length: int) -> Any:
        return self.real.init_cache(slots, length)

    def forward(
        self, tokens: Array, layout: Layout, cache: Any, *, taps: tuple[int, ...] = (), context: int | None = None
    ) -> tuple[Array, Array, Any]:
        """The real forward; behind its states ride the next token of each row, in bytes, and the verdict on it."""
        hidden, features, cache = self.real.forward(tokens, layout, cache, taps=taps, context=context)
        rows = jnp.arange(layout.start.shape[0])
        block = self.trace.block(layout.first_slot + rows, layout.start)[layout.row]
        last = self.trace.accepted.shape[1] - 1
        verdict = self.trace.accepted[block, jnp.minimum(layout.offset, last)]
        drafted = layout.offset + 1 < layout.count[layout.row]
        following = jnp.roll(tokens, -1)
        columns = [(following >> (8 * i)) & 255 for i in range(_BYTES)]
        columns.append(jnp.where(drafted, jnp.where(verdict, 1, -1), 0))
        return jnp.concatenate([hidden, jnp.stack(columns, axis=1).astype(hidden.dtype)], axis=1), features, cache

    def unembed(self, hidden: Array) -> Array:
        """The real logits, the drafted token's raised or lowered."""
        states, extra = hidden[..., : -_BYTES - 1], hidden[..., -_BYTES - 1 :]
        logits = self.real.unembed(states)
        following = sum(extra[..., i].astype(jnp.int32) << (8 * i) for i in range(_BYTES))
        columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        force = _FORCED * extra[..., -1:].astype(logits.dtype)
        return jnp.where(columns == following[..., None], logits + force, logits)


class ScriptedDrafter(Drafter):
    """A drafter whose confidences are a trace's; everything else is the real one's."""

    trace: Trace = None  # type: ignore[assignment]

    def propose(self, state: Any, anchor: Array, length: Array, *arguments: Any, **options: Any) -> Any:
        proposal = super().propose(state, anchor, length, *arguments, **options)
        block = self.trace.block(jnp.arange(length.shape[0]), length)
        drafts = proposal.tokens.shape[1]
        return proposal.replace(confidence_logits=self.trace.confidence[block, :drafts])


def scripted(target: Target, drafter: Drafter, trace: Trace) -> tuple[ScriptedTarget, ScriptedDrafter]:
    """Both models under one trace."""
    fields = {name: getattr(drafter, name) for name in drafter.__dataclass_fields__}
    return ScriptedTarget(target, trace), ScriptedDrafter(**fields, trace=trace)


def load(path: str) -> Trace:
    """From ``survival [N, G]`` and ``accepted [N]`` of the traces that benchmarks/bench_load.py records."""
    with np.load(path) as arrays:
        survival, accepted = arrays["survival"], arrays["accepted"]
    before = np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)
    conditional = np.clip(survival / np.maximum(before, 1e-6), 1e-4, 1 - 1e-4)
    kept = np.arange(survival.shape[1])[None, :] < accepted[:, None]
    return Trace(jnp.asarray(np.log(conditional / (1 - conditional)), jnp.float32), jnp.asarray(kept))


__all__ = ["MARK", "ScriptedDrafter", "ScriptedTarget", "Trace", "load", "made_up", "scripted"]
