"""What goes into a fused verification and what comes out; shared by backends, tests and benchmarks.

Shapes: T flat target tokens, R requests, G drafts a request, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array

RESIDUAL_FLOOR = 1e-8
"""At or below this residual mass the draw is from p itself."""

SOUND_ABOVE = -1e38
"""A log-sum-exp at or below this one, infinite or NaN belongs to logits that are no distribution."""


class Rows(NamedTuple):
    """The target's flat rows and the keys of their numbers."""

    logits: Array  # [T, V], any float type
    inverse: Array  # [T] float32, 1 / temperature (1 where greedy)
    noisy: Array  # [T] float32, 1 where the row's own choice takes noise (`coupled`, plain decoding), else 0
    word0: Array  # [T] uint32, the words of the plain key at the position that the row predicts
    word1: Array  # [T] uint32
    token: Array  # [T] int32 drafted at the position that the row predicts; -1 for none


class RowStatistics(NamedTuple):
    """All that acceptance needs of a row."""

    choice: Array  # [T] int32, the target's own choice: arg-max of logits / temperature (+ noise)
    lse: Array  # [T] float32, log-sum-exp of logits / temperature
    log_p: Array  # [T] float32, log-probability of `token`; meaningless where there is none


class Requests(NamedTuple):
    """The drafts of R requests and the keys of the `rejection` rule."""

    rows: Array  # [R, G + 1] int32: flat row of the anchor and of each draft (any row where none was admitted)
    tokens: Array  # [R, G] int32 target ids
    log_q: Array  # [R, G] float32 of each token under the distribution it was drawn from
    admitted: Array  # [R] int32
    decide: Array  # [R] bool: `coupled` or greedy, so a draft is accepted iff it is the target's own choice
    accept0: Array  # [R, G] uint32, words of the accept numbers
    accept1: Array  # [R, G] uint32
    draw0: Array  # [R, G + 1] uint32, words of the residual draw if the block ends at this place
    draw1: Array  # [R, G + 1] uint32


class Outcome(NamedTuple):
    """What a verification decides."""

    accepted: Array  # [R] int32 leading drafts that were accepted
    next_token: Array  # [R] int32, the target's own token behind them
    sound: Array  # [T] bool, False for a row whose logits hold NaN or no finite maximum
