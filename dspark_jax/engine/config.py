"""What an engine is asked to be. Frozen: what really runs stands in ``Engine.mode`` and ``Engine.notes``."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

MODES = ("fixed", "threshold", "early_stop", "lagged", "current", "none")
"""How many drafts a cycle verifies: all of them (``fixed``); up to the first position below a confidence
threshold; Algorithm 1 of the paper; a capacity from scores two cycles old; a capacity from the cycle's own
scores;
or no drafts at all."""

RULES = ("rejection", "coupled")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Size and behaviour of an engine.

    Attributes:
        max_num_seqs: S, requests decoded at once; further ones wait.
        max_model_len: tokens of a request, prompt included. A target with a smaller window sets the limit.
        mode: one of ``MODES``. Without a drafter it is ``none``; adaptive modes learn acceptance by position where the
            drafter has no confidence head. ``Engine.notes`` says so.
        num_speculative_tokens: drafts a block; None: the drafter's own block.
        draft_widths: drafts of the blocks among which adaptive modes choose from cycle to cycle; the whole block is
            always one of them. None: chosen, within ``max_programs``: about half a block beside the whole one, where
            that has at least 5 drafts and the drafter makes narrower blocks with less work, and a measured table of
            ``step_time`` knows their times.
        verification: rule of requests that name none and bring no seed.
        confidence_threshold: of mode ``threshold``, compared with the raw sigmoid of the confidence logit.
        calibration: a Calibration or CalibrationTables; None: the drafter's own if it has one.
        step_time: a StepTimeTable, taken as given, or the path of one, which must be of this machine and model.
            None: the adaptive modes measure their own at start-up (``Engine.warmup``).
        profile_seconds: budget of that measurement.
        profile_dir: where measured tables are kept for the next start; None: the user's cache directory; "": they
            are not.
        profile_temperature: of the requests that are measured. A batch whose requests are all greedy skips noise and
            acceptance tests, over large vocabularies a good part of a draft: 0 where such batches are the rule.
        correct_step_times: adaptive modes decide by the table as the cycles measured since would have it. Without it
            a drift is only logged.
        min_gain: adaptive modes draft only where tokens per second are predicted to grow by more than this share.
        speed_floor: tokens per second that adaptive modes try to keep for every request (0: none), pieces of prompts in
            the same step included.
        overlap: dispatch a cycle before reading the one before it. False is the serial twin: the same tokens (but for
            ``rejection`` where ``fixed`` or ``threshold`` share a ``max_num_batched_tokens`` that is less than whole
            blocks: it knows a cycle earlier who has ended, so that blocks have other lengths; the law is the same).
        prefill_buckets: sizes of a prompt's pieces in tokens. None, here and below: chosen.
        slot_buckets, token_buckets, context_buckets: numbers of slots, of flat tokens and of cache cells for
            which programs are compiled. The largest slot and context buckets are always among them. What is
            given here, and in ``draft_widths``, is not held to ``max_programs``.
        max_programs: budget of compiled programs; None: 24 on CPU, 64 elsewhere.
        max_stop_token_ids: stop tokens a request may name.
        enable_prefix_caching: keep what is computed of prompts and answers, and do not compute the same beginning
            twice.
        prefix_cache_tokens: tokens that are kept, least recently used first out. None: a quarter of what all slots
            hold, at least one window.
        kv_cache_tokens: tokens that all requests together may have cached in their slots. Those who come wait until
            there is room; where those at work outgrow it, the one that came last gives up its slot and goes on later.
            None: what the slots hold, which is never too little.
        max_num_batched_tokens: tokens of one step: requests that decode, their drafts, and pieces of prompts, which
            take what the others leave: the largest piece at most, the smallest in any case. Adaptive modes admit what
            pays within it; ``fixed`` and ``threshold`` shorten all blocks alike. None: a whole block of every slot,
            and the largest piece.
        seed: draws the seeds of requests that bring none; None: from the operating system.
    """

    max_num_seqs: int = 8
    max_model_len: int = 2048
    mode: str = "lagged"
    num_speculative_tokens: int | None = None
    draft_widths: tuple[int, ...] | None = None
    verification: str = "rejection"
    confidence_threshold: float = 0.0
    calibration: Any = None
    step_time: Any = None
    profile_seconds: float = 15.0
    profile_dir: str | None = None
    profile_temperature: float = 1.0
    correct_step_times: bool = False
    min_gain: float = 0.0
    speed_floor: float = 0.0
    overlap: bool = True
    prefill_buckets: tuple[int, ...] | None = None
    slot_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    context_buckets: tuple[int, ...] | None = None
    max_programs: int | None = None
    max_stop_token_ids: int = 16
    enable_prefix_caching: bool = True
    prefix_cache_tokens: int | None = None
    kv_cache_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_stop_token_ids"):
            _require_count(name, getattr(self, name))
        for name in (
            "num_speculative_tokens",
            "max_programs",
            "prefix_cache_tokens",
            "kv_cache_tokens",
            "max_num_batched_tokens",
        ):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2 (a prompt token and a new one), found 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be True or False, found {self.enable_prefix_caching!r}")
        _require_choice("mode", self.mode, MODES)
        _require_choice("verification", self.verification, RULES)
        if not 0.0 <= _number("confidence_threshold", self.confidence_threshold) <= 1.0:
            raise ValueError(f"confidence_threshold must lie in [0, 1], found {self.confidence_threshold}")
        for name in ("profile_seconds", "profile_temperature", "min_gain", "speed_floor"):
            if not 0.0 <= _number(name, getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a finite number >= 0, found {getattr(self, name)}")
        _require_seed(self.seed)
        for name in ("draft_widths", "prefill_buckets", "slot_buckets", "token_buckets", "context_buckets"):
            values = getattr(self, name)
            if values is not None:
                _require_buckets(name, values)
                object.__setattr__(self, name, tuple(int(v) for v in values))


def _require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, found {value!r}")


def _require_seed(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 0):
        raise ValueError(f"seed must be an integer of at least 0 or None, found {value!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, found {value!r}")
    return float(value)


def _require_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, found {value!r}")


def _require_buckets(name: str, values: Any) -> None:
    if not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence of integers, found {values!r}")
    if not values:
        raise ValueError(f"{name} is empty; None lets the engine choose")
    for value in values:
        _require_count(name, value)
    if list(values) != sorted(set(values)):
        raise ValueError(f"{name} must increase, found {tuple(values)}")
