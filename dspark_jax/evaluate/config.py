"""What an evaluation is: models, prompt sets, ways of sampling. Read from TOML; unknown keys are errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax.config import Sampling

PLAIN = "plain"
"""Name of the row that decodes without a drafter."""


@dataclasses.dataclass(frozen=True)
class DrafterEntry:
    """A drafter to measure.

    Attributes:
        name: of its rows. path: as for ``load_drafter``.
        num_speculative_tokens: drafts a block; 0: the drafter's own block.
    """

    name: str
    path: str
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.name == PLAIN or "/" in self.name:
            raise ValueError(f"a drafter's name must be a word other than {PLAIN!r}, found {self.name!r}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens must be 0 or more, found {self.num_speculative_tokens}")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A set of prompts (``data/prompts.py``).

    Attributes:
        prompts: its first so many are used.
        group: the macro mean takes one value a group, over all prompts of its sets; empty: the set is its own.
    """

    name: str
    path: Path
    prompts: int = 24
    group: str = ""

    def __post_init__(self) -> None:
        if not self.name or self.prompts < 1:
            raise ValueError(f"a prompt set needs a name and at least one prompt, found {self}")


@dataclasses.dataclass(frozen=True)
class SamplingRun:
    """One way of sampling; every drafter runs under each.

    Attributes:
        verification: ``rejection`` or ``coupled``.
    """

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Literal["rejection", "coupled"] = "rejection"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"a way of sampling needs a name without /, found {self.name!r}")
        self.sampling()

    def sampling(self) -> Sampling:
        """As the engine takes it."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How texts are decoded.

    Attributes:
        max_new_tokens: of every prompt.
        max_num_seqs: texts decoded at once. max_model_len: of a text, prompt included.
        stop_at_eos: texts end at the target's end-of-text tokens.
        seed: prompt i of a set has the seed ``seed + i``, the same for every drafter.
        dtype: of target and drafters.
    """

    max_new_tokens: int = 128
    max_num_seqs: int = 8
    max_model_len: int = 1024
    stop_at_eos: bool = True
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if min(self.max_new_tokens, self.max_num_seqs, self.max_model_len - 1) < 1 or not 0 <= self.seed < 2**31:
            raise ValueError(f"counts must be positive and the seed in [0, 2^31), found {self}")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Everything that decides an evaluation but its folder.

    Attributes:
        plain: also decode without a drafter ("tokens/s with and without").
        thresholds: confidence thresholds of the static sweep (Figure 5), for drafters with a confidence head.
        threshold_runs: names of the ways of sampling that are swept; empty: the first.
        bootstrap: resamples of the intervals.
    """

    target: str
    drafters: tuple[DrafterEntry, ...]
    suites: tuple[Suite, ...]
    runs: tuple[SamplingRun, ...] = (SamplingRun("greedy", 0.0), SamplingRun("t1", 1.0))
    decode: DecodeConfig = DecodeConfig()
    plain: bool = True
    thresholds: tuple[float, ...] = ()
    threshold_runs: tuple[str, ...] = ()
    bootstrap: int = 2000

    def __post_init__(self) -> None:
        for what, entries in (("drafters", self.drafters), ("suites", self.suites), ("runs", self.runs)):
            names = [entry.name for entry in entries]  # type: ignore[attr-defined]
            if len(set(names)) < len(names):
                raise ValueError(f"{what}: names must differ, found {', '.join(names)}")
        if not self.suites or not self.runs or not (self.drafters or self.plain):
            raise ValueError("nothing to measure: suites, runs and drafters (or plain) must not be empty")
        if any(not 0.0 <= x <= 1.0 for x in self.thresholds):
            raise ValueError(f"thresholds must lie in [0, 1], found {self.thresholds}")
        unknown = set(self.threshold_runs) - {run.name for run in self.runs}
        if unknown:
            raise ValueError(f"threshold_runs: no such runs: {', '.join(sorted(unknown))}")
        if self.bootstrap < 1:
            raise ValueError(f"bootstrap must be at least 1, found {self.bootstrap}")
