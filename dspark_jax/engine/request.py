"""What goes into the engine and what comes out of it, and the checks at its door."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from dspark_jax.config import Sampling
from dspark_jax.engine.config import RULES


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to continue.

    Attributes:
        prompt_ids: token ids, at least one.
        max_new_tokens: at least 1; what does not fit into the window is cut, and the request then ends by
            ``length``.
        sampling: temperature and filters.
        seed: an integer in [0, 2^32); None: a fresh one.
        verification: ``rejection`` or ``coupled``. None: ``coupled`` if there is a seed, else the engine's
            rule.
        stop_token_ids: tokens that end the text; the one that does is kept as its last token.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int | None = None
    verification: str | None = None
    stop_token_ids: Sequence[int] = ()


@dataclasses.dataclass
class Event:
    """What one step did for one request."""

    id: int
    tokens: list[int] = dataclasses.field(default_factory=list)  # new ones
    committed: list[int] = dataclasses.field(default_factory=list)  # tokens kept, one entry a cycle
    offered: list[int] = dataclasses.field(default_factory=list)  # drafts verified, one entry a cycle
    finished: bool = False
    finish_reason: str | None = None  # stop | length | cancelled | error
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    result: Result | None = None  # of the whole request, once finished


@dataclasses.dataclass(frozen=True)
class Result:
    """A request that has ended. ``1 + sum(committed) == len(tokens)`` unless it ended before its first token.

    ``error``: the next token's logits are not finite (NaN in what the model computes); the tokens are those before.
    """

    tokens: list[int]  # the new ones
    committed: list[int]
    offered: list[int]
    finish_reason: str  # stop | length | cancelled | error
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache


@dataclasses.dataclass(frozen=True)
class Checked:
    """A request as the engine works with it: plain Python numbers, the rule and the limit decided."""

    prompt: tuple[int, ...]
    limit: int  # tokens it may emit; cut to the window
    sampling: Sampling
    seed: int | None
    coupled: bool
    stop_ids: tuple[int, ...]


def check(request: Request, *, window: int, vocab_size: int | None, verification: str, max_stops: int) -> Checked:
    """Refuses what cannot be decoded.

    Args:
        window: tokens of a request, prompt included.
        vocab_size: None where the target does not say.
        verification: the engine's own rule.

    Raises:
        ValueError: naming the field and what it should be.
    """
    prompt = _integers("prompt_ids", request.prompt_ids)
    if not prompt:
        raise ValueError("prompt_ids is empty: there is no token to start from")
    bad = [t for t in prompt if t < 0 or (vocab_size is not None and t >= vocab_size)]
    if bad:
        raise ValueError(f"prompt_ids holds token id {bad[0]}, outside the vocabulary of {vocab_size} tokens")
    if len(prompt) + 1 > window:
        raise ValueError(
            f"prompt_ids: {len(prompt)} tokens leave no room for a new one in the window of {window} tokens"
        )
    limit = _integer("max_new_tokens", request.max_new_tokens)
    if limit < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {limit}")
    if not isinstance(request.sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling, found {type(request.sampling).__name__}")
    seed = None if request.seed is None else _integer("seed", request.seed)
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in [0, 2^32), found {seed}")
    if request.verification not in (None, *RULES):
        raise ValueError(f"verification must be one of {', '.join(RULES)} or None, found {request.verification!r}")
    stops = _integers("stop_token_ids", request.stop_token_ids)
    if len(stops) > max_stops:
        raise ValueError(
            f"stop_token_ids: {len(stops)} ids, but this engine holds {max_stops} (EngineConfig.max_stop_token_ids)"
        )
    if any(not 0 <= t < 2**31 for t in stops):
        raise ValueError(f"stop_token_ids must be token ids, found {stops}")
    rule = request.verification or (verification if seed is None else "coupled")
    return Checked(prompt, min(limit, window - len(prompt)), request.sampling, seed, rule == "coupled", stops)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, found {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, found {value!r}") from None


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a sequence of token ids, found {type(values).__name__}")
    try:
        return tuple(_integer(name, v) for v in values)
    except TypeError:
        raise ValueError(f"{name} must be a sequence of token ids, found {type(values).__name__}") from None
