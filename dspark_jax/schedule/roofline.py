"""Step times of hardware that is not here, from what its memory and its arithmetic allow.

A part of a step takes the longer of two times, and its parts run one after the other:

    ms = 1000 * sum over parts of max(bytes / (e * bandwidth), flops / (e * peak))

e is the share of both that is reached (1: the roof itself). A forward of the target over T tokens of S slots, each
with a context of C cells, has three parts (P parameters in matmuls, L layers, H heads and K key heads of size D,
V tokens, b bytes of a number):

    matmuls    P b bytes,            2 T P flops
    attention  2 L S C K D b bytes,  4 L T C H D flops
    logits     2 * 4 T V bytes       (float32, written once and read once)

and a draft of blocks of G tokens for S slots has the same three for its own layers (T = S G), the unembedding among
its matmuls, and two more: the context it takes in from the target's last cycle (at most G + 1 tokens a request), and
the sequential head, which reads its V x r matrix G times. Kernel launches, communication and sampling beyond one pass
over the logits cost nothing here; nor does the formula ask whether the caches fit into the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_jax.schedule.step_time import StepTimeTable

BYTES = 2
"""Of a weight or a cached number: bfloat16."""

LOGIT_BYTES = 2 * 4
"""Of a float32 logit that is written once and read once."""

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Chip:
    """What a device can do at most."""

    name: str
    bandwidth: float  # bytes/s of its memory
    peak: float  # dense flops/s in bfloat16

    def ms(self, parts: Sequence[tuple[float, float]], efficiency: float) -> float:
        """Milliseconds of parts (bytes, flops) that run one after the other."""
        seconds = sum(max(size / self.bandwidth, flops / self.peak) for size, flops in parts)
        return 1e3 * seconds / efficiency


@dataclass(frozen=True)
class Decoder:
    """Shapes of a decoder with gated MLPs and grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Of one layer's matmuls."""
        attention = 2 * self.hidden * (self.heads + self.key_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Of the unembedding. The embedding itself is looked up: a few rows."""
        return self.vocab * self.hidden


@dataclass(frozen=True)
class Draft:
    """Shapes of a DSpark drafter; its layers are as wide as its target's."""

    layers: int = 5
    block: int = 7  # G
    taps: int = 5  # target layers it reads
    rank: int = 256  # r of the sequential head, 0 without one


H100_SXM = Chip("H100 SXM", bandwidth=3.35e12, peak=989e12)
CHIPS = {"h100-sxm": H100_SXM}

QWEN3 = {
    "qwen3-4b": Decoder(36, 2560, 32, 8, 128, 9728, 151936),
    "qwen3-8b": Decoder(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": Decoder(40, 5120, 40, 8, 128, 17408, 151936),
}
"""Targets of the paper's Table 1 whose drafters are published, in blocks of 7 (deepseek-ai/dspark_qwen3_8b_block7)."""


def step_ms(model: Decoder, chip: Chip, tokens: int, slots: int, context: int, efficiency: float = 1.0) -> float:
    """Milliseconds of the target's forward over ``tokens`` tokens of ``slots`` requests."""
    parameters = model.layers * model.layer_parameters + model.head_parameters
    parts = [
        (BYTES * parameters, 2.0 * tokens * parameters),
        _attention(model, model.layers, tokens, slots, context),
        (LOGIT_BYTES * tokens * model.vocab, 0.0),
    ]
    return chip.ms(parts, efficiency)


def draft_ms(model: Decoder, draft: Draft, chip: Chip, slots: int, context: int, efficiency: float = 1.0) -> float:
    """Milliseconds of drafting a block for each of ``slots`` requests of a target ``model``."""
    tokens = slots * draft.block
    parameters = draft.layers * model.layer_parameters + model.head_parameters
    keys_values = 2 * draft.layers * model.hidden * model.key_heads * model.head_dim
    absorbed = draft.taps * model.hidden**2 + keys_values
    head = model.vocab * draft.rank
    parts = [
        (BYTES * absorbed, 2.0 * (tokens + slots) * absorbed),
        (BYTES * parameters, 2.0 * tokens * parameters),
        _attention(model, draft.layers, tokens, slots, context),
        (LOGIT_BYTES * tokens * model.vocab, 0.0),
        *[(BYTES * head, 2.0 * slots * head)] * draft.block,
    ]
    return chip.ms(parts, efficiency)


def _attention(model: Decoder, layers: int, tokens: int, slots: int, context: int) -> tuple[float, float]:
    """(bytes, flops): keys and values are read once a slot, scores and sums made for every token."""
    size = 2.0 * layers * slots * context * model.key_heads * model.head_dim * BYTES
    return size, 4.0 * layers * tokens * context * model.heads * model.head_dim


def token_sizes(slots: int, block: int) -> list[int]:
    """Sizes of a verify forward for ``slots`` requests: every whole number of tokens a request, and halves of the
    first ones, where most decisions lie."""
    halves = {round(slots * half / 2) for half in range(2, 8)}
    return sorted(halves | {slots * count for count in range(1, block + 2)})


def roofline_table(
    model: Decoder,
    draft: Draft | None,
    chip: Chip,
    *,
    efficiency: float = 1.0,
    slots: Sequence[int] = SLOTS,
    contexts: Sequence[int] = CONTEXTS,
    name: str = "",
) -> StepTimeTable:
    """A table as an engine measures it: a row for each slot bucket and context, ``draft_ms`` beside it.

    Args:
        draft: None: rows for plain decoding, one token a request.
        efficiency: share of bandwidth and of peak that is reached, in (0, 1].
        name: of the model, for the table's ``model_hash``.

    Raises:
        ValueError: an efficiency outside (0, 1].
    """
    if not 0.0 < efficiency <= 1.0:
        raise ValueError(f"efficiency: a share in (0, 1] expected, got {efficiency}")
    rows = []
    for count in slots:
        for context in contexts:
            tokens = token_sizes(count, draft.block) if draft else [count]
            found = [_shown(step_ms(model, chip, t, count, context, efficiency)) for t in tokens]
            drafting = _shown(draft_ms(model, draft, chip, count, context, efficiency)) if draft else None
            rows.append(
                StepTimeTable(
                    tokens=tokens,
                    milliseconds=found,
                    context_tokens=context,
                    slots=count,
                    draft_ms=drafting,
                    machine=f"roofline at {efficiency:g} of {chip.bandwidth:.3g} bytes/s and {chip.peak:.3g} flops/s",
                    device=chip.name,
                    dtype="bfloat16",
                    model_hash=name or None,
                )
            )
    return StepTimeTable.combine(rows)


def _shown(ms: float) -> float:
    """Five digits: no more is known, and files stay readable."""
    return float(f"{ms:.5g}")
