"""An engine before its first request: what it is made of, its compiled programs and its step times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from dspark_jax.cycle import Static, TargetModel
from dspark_jax.drafters.base import DrafterModel
from dspark_jax.engine.buckets import Key, plan_buckets
from dspark_jax.engine.config import EngineConfig
from dspark_jax.engine.modes import choose_policy
from dspark_jax.engine.multiprocess import Link, SharedPrograms
from dspark_jax.engine.origin import origin
from dspark_jax.engine.policy import Temperatures
from dspark_jax.engine.profile import profile
from dspark_jax.engine.programs import Programs
from dspark_jax.engine.step_times import Store, given, obtain
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
        self._temperatures = Temperatures(
            own if config.calibration is None else config.calibration, self._policy.drafts
        )
        budget = config.max_programs or (24 if jax.default_backend() == "cpu" else 64)
        self.buckets = plan_buckets(
            config,
            window=self.window,
            drafts=self._policy.drafts,
            variable=self._policy.variable,
            skips=self._policy.skips,
            budget=budget,
            absorb_rows=1 if jax.default_backend() == "cpu" else config.max_num_seqs,
        )
        self._origin = origin(target, drafter) if self._policy.timed else {}
        self._times = given(config.step_time, self._origin, self.buckets) if self._policy.timed else None
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
        )
        self._state: Any = None

    def prepare(self, progress: Progress, anew: bool = False) -> None:
        """Compiles what is not compiled, and gets step times where the mode needs them and has none."""
        keys = self.buckets.keys(self.window - 1)
        self._state = self._programs.compile_all(keys, self._state, progress)
        if self._policy.timed and (anew or self._times is None):
            store = Store(self.config.profile_dir, self._origin, repr((self._policy.rule, keys)))
            self._times = obtain(lambda: self._measure(progress), store, progress, anew)
        self._programs.warm = True

    def _measure(self, progress: Progress) -> StepTimeTable:
        """Step times of the engine's own programs; the engine must be idle."""

        def run(key: Key) -> float:
            self._state, seconds = self._programs.rehearse(key, self._state)
            return seconds

        found = profile(run, self.buckets, self.window - 1, self._origin, budget_s=self.config.profile_seconds)
        self._state = self._programs.rest(self._state)
        for line in found.lines():
            progress(line)
        return found.table
