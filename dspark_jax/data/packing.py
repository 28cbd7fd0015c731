"""Which blocks of a sequence are drafted in training, and how they are packed (paper section 5.1).

Anchors are drawn at random; the blocks behind them are laid end to end in T flat slots of static shape. A block
of width w takes w slots and not the whole block size, so training many widths at once wastes nothing. The widths
are a fixed pattern over anchors that come in random order: the width of an anchor is as good as random.

Letters beside those of ``types``: A anchors a sequence, T slots a sequence, K widest block, L sequence length.
"""

from __future__ import annotations

import dataclasses
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.types import Array


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The static arrangement of A blocks; hashable. Slot k of a block predicts position anchor + k + 1."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"block widths must be 1 or more, found {self.widths}")

    @classmethod
    def cycle(cls, anchors: int, widths: tuple[int, ...]) -> BlockPlan:
        """A plan of ``anchors`` blocks that repeats the pattern ``widths``."""
        return cls(tuple(itertools.islice(itertools.cycle(widths), anchors)))

    def part(self, parts: int) -> BlockPlan:
        """The plan of one of ``parts`` equal parts. Raises ValueError where the pattern does not divide so."""
        size = len(self.widths) // max(parts, 1)
        if parts < 1 or size * parts != len(self.widths) or self.widths != self.widths[:size] * parts:
            raise ValueError(f"{len(self.widths)} blocks do not fall into {parts} parts of the same widths")
        return BlockPlan(self.widths[:size])

    def most_parts(self, parts: int) -> int:
        """The largest number up to ``parts`` into which the plan divides (``part``)."""
        sizes = ((len(self.widths) // n, n) for n in range(parts, 0, -1) if len(self.widths) % n == 0)
        return next(n for size, n in sizes if self.widths == self.widths[:size] * n)

    @property
    def anchors(self) -> int:
        return len(self.widths)

    @property
    def slots(self) -> int:
        return sum(self.widths)

    @property
    def widest(self) -> int:
        return max(self.widths)

    @property
    def block(self) -> np.ndarray:
        """``[T]``: the block of each slot."""
        return np.repeat(np.arange(self.anchors), self.widths)

    @property
    def offset(self) -> np.ndarray:
        """``[T]``: k, the place of each slot in its block."""
        return np.concatenate([np.arange(w) for w in self.widths])

    @property
    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """``[T, K]`` slots of each slot's own block, and which of the K places are real."""
        first = np.cumsum((0, *self.widths[:-1]))[self.block]
        width = np.asarray(self.widths)[self.block]
        place = np.arange(self.widest)
        return first[:, None] + np.minimum(place, width[:, None] - 1), place < width[:, None]


class Slots(flax.struct.PyTreeNode):
    """What every slot of a packed batch reads and is asked for."""

    anchors: Array  # [B, A] int32 positions
    keep: Array  # [B, A] bool: False where a sequence had too few eligible anchors
    tokens: Array  # [B, T] int32 block inputs: the anchor's token or the mask token
    position: Array  # [B, T] int32 absolute positions of the inputs
    previous: Array  # [B, T] int32 token before the predicted position (the Markov head's input)
    labels: Array  # [B, T] int32 token at the predicted position
    row: Array  # [B, T] int32 position whose target logits predict the label
    mask: Array  # [B, T] bool: counted in the loss


def eligible(loss_mask: Array) -> Array:
    """``[B, L]`` bool: an anchor is a learnt token whose successor is learnt as well."""
    return loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))


def sample_anchors(key: Array, loss_mask: Array, count: int) -> tuple[Array, Array]:
    """``count`` eligible positions of each row, without replacement and in random order.

    Returns:
        anchors ``[B, count]`` int32 (0 where there were too few) and keep ``[B, count]`` bool.
    """
    score = jnp.where(eligible(loss_mask), jax.random.uniform(key, loss_mask.shape, minval=0.5), 0.0)
    best, at = jax.lax.top_k(score, count)
    keep = best > 0
    return jnp.where(keep, at, 0).astype(jnp.int32), keep


def pack(plan: BlockPlan, anchors: Array, keep: Array, tokens: Array, loss_mask: Array, mask_token_id: int) -> Slots:
    """The slots of a batch ``tokens [B, L]`` whose blocks begin at ``anchors [B, A]``.

    A slot counts while every label of its block up to its own lies in the sequence and in the loss mask: behind
    a prompt's first token, or the end, a block has nothing to be verified against.
    """
    length = tokens.shape[1]
    block, offset = jnp.asarray(plan.block), jnp.asarray(plan.offset)[None, :]
    start = anchors[:, block]
    row = jnp.minimum(start + offset, length - 1)
    label_at = start + offset + 1
    clipped = jnp.minimum(label_at, length - 1)

    def at(values: Array, where: Array) -> Array:
        return jnp.take_along_axis(values, where, axis=1)

    learnt = jnp.cumsum(loss_mask.astype(jnp.int32), axis=1)
    unbroken = at(learnt, clipped) - at(learnt, start) == offset + 1
    return Slots(
        anchors=anchors,
        keep=keep,
        tokens=jnp.where(offset == 0, at(tokens, start), mask_token_id),
        position=start + offset,
        previous=at(tokens, row),
        labels=at(tokens, clipped),
        row=row,
        mask=unbroken & (label_at < length) & keep[:, block],
    )
