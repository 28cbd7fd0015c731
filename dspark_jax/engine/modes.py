"""From the mode that is asked for to the policy that runs."""

from __future__ import annotations

from typing import Any

from dspark_jax.drafters.base import drafts_of_block, narrower_blocks
from dspark_jax.engine.adaptive import Current, EarlyStop, Lagged
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.policy import Plain, Policy, Threshold

ADAPTIVE: dict[str, type[Lagged]] = {"lagged": Lagged, "early_stop": EarlyStop, "current": Current}


def choose_policy(config: EngineConfig, drafter: Any) -> tuple[str, Policy, list[str]]:
    """The mode that can run, its policy, and a line for everything that is not as asked.

    Raises:
        ValueError: the mode needs what the drafter does not have, or ``num_speculative_tokens`` or ``draft_widths``
            does not fit it.
    """
    notes: list[str] = []
    mode = config.mode
    if drafter is None:
        if mode != "none":
            notes.append(f"mode {mode} runs as none: there is no drafter")
        return "none", Plain(0), notes
    if mode == "none":
        return "none", Plain(0), notes
    drafts = drafts_of_block(drafter, config.num_speculative_tokens)
    if mode == "threshold" and not drafter.has_confidence:
        raise ValueError("mode 'threshold' needs a drafter with a confidence head")
    if mode in ADAPTIVE and not drafter.has_confidence:
        notes.append(f"mode {mode} learns acceptance by position: the drafter has no confidence head")
    policy: Policy
    if mode in ADAPTIVE:
        narrow = _narrow_blocks(config, drafter, drafts)
        policy = ADAPTIVE[mode](drafts, config, has_confidence=drafter.has_confidence, narrow=narrow)
    else:
        if config.draft_widths is not None:
            notes.append(f"mode {mode} drafts whole blocks: draft_widths is for adaptive modes")
        policy = {"fixed": Policy, "threshold": Threshold}[mode](drafts)
    if policy.reads_back and config.overlap:
        notes.append(f"mode {mode} reads scores back before it verifies: cycles do not overlap")
    return mode, policy, notes


LEAST_BLOCK = 5
"""Drafts of a whole block from which on half a block is a choice of its own."""


def _narrow_blocks(config: EngineConfig, drafter: Any, drafts: int) -> tuple[int, ...]:
    """Drafts of the blocks beside whole ones, ascending. Raises ValueError where one exceeds the whole block."""
    if config.draft_widths is not None:
        if config.draft_widths[-1] > drafts:
            raise ValueError(f"draft_widths must lie in 1..{drafts} (the whole block), found {config.draft_widths}")
        return tuple(width for width in config.draft_widths if width < drafts)
    known = narrower_blocks(drafter, drafts) if drafts >= LEAST_BLOCK else ()
    # Half a block rather than more: the whole one is there for those.
    return (min(known, key=lambda width: (abs(2 * width - drafts), width)),) if known else ()
