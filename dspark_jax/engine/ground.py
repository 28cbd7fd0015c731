"""An engine before its first request: what it is made of, its compiled programs and its step times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from dspark_jax.cycle import Static, TargetModel
from dspark_jax.drafters.base import DrafterModel
from dspark_jax.engine.buckets import Buckets, Key, plan_buckets
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.drift import Drift
from dspark_jax.engine.modes import choose_policy
from dspark_jax.engine.multiprocess import Link, SharedPrograms
from dspark_jax.engine.origin import origin
from dspark_jax.engine.policy import Corrections, Costs
from dspark_jax.engine.prefix_cache import BLOCK
from dspark_jax.engine.profile import Profile, profile
from dspark_jax.engine.programs import Programs
from dspark_jax.engine.refine import refine, sizes_of
from dspark_jax.engine.step_times import StepTimes, Store, given, obtain
from dspark_jax.schedule import StepTimeTable

Progress = Callable[[str], None]


class Ground:
    """The part of an engine that knows no requests. ``loop.Engine`` is the whole."""

    def __init__(
        self,
        target: TargetModel,
        drafter: DrafterModel | None = None,
        config: EngineConfig | None = None,
        *,
        static: Static | None = None,
        link: Link | None = None,
    ) -> None:
        self._link = link
        self.config = config = EngineConfig() if config is None else config
        self.mode, self._policy, self.notes = choose_policy(config, drafter)
        self.window = min(config.max_model_len, target.max_positions)
        if self.window < config.max_model_len:
            self.notes.append(f"max_model_len {config.max_model_len} is cut to the target's window of {self.window}")
        drafter = None if self.mode == "none" else drafter
        self._vocab_size = getattr(target, "vocab_size", None)
        own = getattr(drafter, "calibration", None)
        self._corrections = Corrections(own if config.calibration is None else config.calibration, self._policy.drafts)
        self._budget = config.max_programs or (24 if jax.default_backend() == "cpu" else 64)
        # By step times where the mode has them; what the caller names stays as it is.
        self._refines = self._policy.timed and config.token_buckets is None
        self._planned = self.buckets = plan_buckets(
            config,
            window=self.window,
            drafts=self._policy.drafts,
            variable=self._policy.variable,
            skips=self._policy.skips,
            budget=self._budget,
            spend=not self._refines,
            absorb_rows=1 if jax.default_backend() == "cpu" else config.max_num_seqs,
            stored_blocks=_stored_blocks(config, self.window),
            look=self._policy.look,
            narrow=self._policy.narrow,
        )
        self.cache_tokens = self._cache_tokens()
        self.step_tokens = (
            config.max_num_batched_tokens or config.max_num_seqs * self.buckets.width + self.buckets.prefill[-1]
        )
        # A step of fewer tokens than whole blocks is shared, so that who has ended decides on the others' lengths.
        shared = self._policy.drafts > 0 and config.max_num_batched_tokens is not None
        self._competes = self._policy.competes or shared
        self._lookback = 0 if drafter is None else drafter.lookback
        self._origin = origin(target, drafter) if self._policy.timed else {}
        self._times = given(config.step_time, self._origin, self.buckets) if self._policy.timed else None
        if self._times is not None and self._refines:
            self.buckets = self._refined_by(self._times)
        self._drift = Drift(self.buckets, config.correct_step_times)
        programs = Programs if link is None else partial(SharedPrograms, link=link)
        self._programs = programs(
            target,
            drafter,
            self.buckets,
            slots=config.max_num_seqs,
            stop_ids=config.max_stop_token_ids,
            rule=self._policy.rule,
            max_positions=target.max_positions,
            static=Static() if static is None else static,
            temperature=config.profile_temperature,
        )
        self._state: Any = None

    def _cache_tokens(self) -> int:
        """Tokens that all slots together may hold. Raises ValueError where one request alone may need more."""
        config, least = self.config, self.window + self.buckets.width
        tokens = config.kv_cache_tokens or config.max_num_seqs * least
        if tokens < least:
            raise ValueError(
                f"kv_cache_tokens: {tokens} tokens do not hold one request of the window's {self.window} tokens and a "
                f"block behind it; at least {least}, or a smaller max_model_len"
            )
        return tokens

    def prepare(self, progress: Progress, anew: bool = False) -> None:
        """Compiles what is not compiled, and gets step times where the mode needs them and has none."""
        if self._policy.timed and (anew or self._times is None):
            planned = self._planned.keys(self.window - 1)
            budget = self._budget if self._refines else 0
            served = self._policy.rule, planned, budget, self.config.profile_temperature
            store = Store(self.config.profile_dir, self._origin, repr(served))
            self._compile(self._planned, progress)
            self._times = obtain(lambda: self._measure(progress), store, progress, anew)
            self._drift.begin()
            if self._refines:
                self._compile(sizes_of(self._times.table, self._planned), progress)
        self._compile(self.buckets, progress)
        self._programs.warm = True

    def _compile(self, buckets: Buckets, progress: Progress) -> None:
        """Works with these buckets from now on; compiles what they have and is not compiled."""
        self.buckets = self._programs.buckets = self._drift.buckets = buckets
        self._state = self._programs.compile_all(buckets.keys(self.window - 1), self._state, progress)

    def _refined_by(self, times: StepTimes) -> Buckets:
        """The planned buckets with the verify sizes of a given table. One that was measured without narrow blocks has
        spent the budget of programs on other ones, and has no time to choose such blocks by."""
        if times.measured:
            planned = self._planned
            if self.config.draft_widths is None:
                planned = dataclasses.replace(planned, narrow=times.known(planned.narrow))
            if planned.narrow != self._planned.narrow:
                self.notes.append("step_time: the table lacks times of narrower blocks, which are left out there")
            return sizes_of(times.table, planned)

        def row(slots: int) -> StepTimeTable:
            return times.table.at(self._planned.contexts_of(slots)[0], slots)

        return refine(
            self._planned,
            lambda slots, tokens: row(slots).ms(tokens) if tokens <= row(slots).last else math.inf,
            lambda slots: row(slots).draft_ms or 0.0,
            self._budget,
            self.window,
            self.config.max_num_batched_tokens,
        )

    def _costs(
        self, cycle: int, requests: int, slots: int, context: int, draft_context: int, spare: int
    ) -> Costs | None:
        """What a cycle of ``requests`` in a slot bucket costs, within ``spare`` tokens; None without step times.

        Pieces of prompts run in programs of their own: they take tokens of the step (``spare``), and none of the verify
        forward, so that the schedule's ``other_tokens`` is 0 here.
        """
        times = self._times
        if times is None:
            return None
        self._drift.advance(cycle)

        def costs(drafting: Sequence[bool], width: int | None = None) -> tuple[StepTimeTable, float]:
            curve = times.curve(requests, slots, context, min(self.buckets.tokens[slots][-1], spare))
            draft_slots = self.buckets.slot_bucket(max(sum(drafting), 1))
            if width is not None and self.buckets.draft_width(draft_slots, width) is None:
                return curve, math.inf
            draft_ms = times.draft_ms(draft_slots, draft_context, width)
            return self._drift.corrected(curve, draft_ms, requests, slots, context), draft_ms

        return costs

    def _measure(self, progress: Progress) -> StepTimeTable:
        """Step times of the engine's own programs; the engine must be idle. What they say decides which further verify
        sizes are compiled, and then measured with the others."""

        def run(key: Key) -> float:
            self._state, seconds = self._programs.rehearse(key, self._state)
            return seconds

        def measured(seconds: float) -> Profile:
            found = profile(run, self.buckets, self.window - 1, self._origin, budget_s=seconds)
            self._state = self._programs.rest(self._state)
            return found

        whole = self.config.profile_seconds
        room = self._refines and len(self.buckets.keys(self.window - 1)) < self._budget
        found = measured(whole / 4 if room else whole)
        if room:
            most = self.config.max_num_batched_tokens
            finer = refine(self.buckets, found.step_ms, found.draft_ms, self._budget, self.window, most)
            self._compile(finer, progress)
            found = measured(whole - found.seconds)
        for line in found.lines():
            progress(line)
        return found.table


def _stored_blocks(config: EngineConfig, window: int) -> int:
    """Rows of the store of prefixes. None where no prompt is long enough to have one."""
    if not config.enable_prefix_caching or window <= BLOCK + 1:
        return 0
    tokens = config.prefix_cache_tokens or max(window, config.max_num_seqs * window // 4)
    return max(tokens // BLOCK, 1)
