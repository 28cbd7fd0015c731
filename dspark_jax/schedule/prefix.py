"""How many drafted tokens to verify for each request: the paper's prefix scheduler (sec. 3.2.2, Algorithm 1).

Source: Cheng et al., arXiv:2607.05147. A schedule admits a prefix of every request's draft block and is worth

    theta = (R + sum of admitted survivals) / step time of (R + drafts admitted) tokens

expected tokens per millisecond, R being the number of requests. Candidates are admitted in one fixed order:
higher survival, then lower slot, then lower position. Rows of survivals never increase, so this order admits
prefixes by itself. Nothing here sees tokens or logits: survival probabilities and step times are the whole
input, which is what the exactness argument of the paper's Appendix A rests on.

Shapes: S requests, G positions of a block. Host functions are NumPy in float64; those whose names end in
`_device` are traced inside a jitted step and work in the dtype they are given.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from dspark_jax.schedule.step_time import StepTimeTable


def survival(confidence: ArrayLike) -> np.ndarray:
    """Survival probabilities: position k survives when all drafts 1..k are accepted.

    Args:
        confidence: [S, G] conditional acceptance probabilities (not logits), each given that all before it
            was accepted.

    Returns:
        [S, G] float64, the cumulative product along each row; rows never increase.

    Raises:
        ValueError: not two-dimensional, or an entry outside [0, 1] or not finite.
    """
    rows = _as_float_rows(confidence, "confidence")
    # NaN fails both comparisons, so this is the check for finite values too.
    if not ((rows >= 0.0).all() and (rows <= 1.0).all()):
        raise ValueError(
            "confidence: every entry must be a probability in [0, 1]; "
            f"the range found is [{rows.min()}, {rows.max()}] (logits are not probabilities)"
        )
    return np.cumprod(rows, axis=1, dtype=np.float64)


def admit_early_stop(
    survival: ArrayLike, table: StepTimeTable, draft_ms: float = 0.0, *, other_tokens: int = 0
) -> np.ndarray:
    """The paper's Algorithm 1: admit in order and stop at the first admission that does not raise theta.

    Its decision about a draft uses nothing that comes after that draft, so it may look at the current cycle's
    scores (Appendix A).

    Args:
        survival: [S, G] survival probabilities, rows non-increasing. R = S: idle slots are left out by the
            caller, a request outside the draft batch is a row of zeros.
        table: step times; drafts that would lead beyond its last entry are not considered.
        draft_ms: milliseconds of the draft, already spent, so on both sides of every comparison.
        other_tokens: tokens of other work in the same forward (prefill rows), added to every token count.

    Returns:
        [S] int32 number of drafts admitted for each request. Survival 0 is never admitted.

    Raises:
        ValueError: rows that increase or leave [0, 1]; R + other_tokens beyond the table; a negative draft_ms
            or other_tokens.
    """
    rows = _survival_rows(survival)
    if not rows.size:
        return np.zeros(rows.shape[0], np.int32)
    values = _candidates(rows)
    expected, step_ms = _admission_path(rows.shape[0], values, table, draft_ms, other_tokens)
    theta = expected / (draft_ms + step_ms)
    stops = theta[1:] <= theta[:-1]
    admitted = int(np.argmax(stops)) if stops.any() else stops.size
    return _lengths(rows, values, admitted)


def capacity(
    survival: ArrayLike,
    table: StepTimeTable,
    draft_ms: float = 0.0,
    *,
    draft_paid: bool = False,
    other_tokens: int = 0,
) -> int:
    """Number of drafts, over all requests, at the best point of the whole admission path.

    The unconstrained search of the paper's sec. 3.2.2: it looks past local dips of theta, so under
    `rejection` it may only be fed scores older than the blocks it decides about (Appendix A shows the bias
    otherwise).

    Args:
        survival: [S, G] as in `admit_early_stop`.
        table: step times; drafts that would lead beyond its last entry are not considered.
        draft_ms: milliseconds that drafting adds to a step.
        draft_paid: the draft has already run, so theta of zero drafts pays `draft_ms` too; otherwise zero
            drafts also skip the draft: theta(0) = R / ms(R).
        other_tokens: tokens of other work in the same forward, added to every token count.

    Returns:
        Drafts admitted in total; the smallest number among equal thetas.

    Raises:
        ValueError: as `admit_early_stop`.
    """
    rows = _survival_rows(survival)
    if not rows.size:
        return 0
    expected, step_ms = _admission_path(rows.shape[0], _candidates(rows), table, draft_ms, other_tokens)
    cost_ms = draft_ms + step_ms
    if not draft_paid:
        cost_ms[0] = step_ms[0]
    return int(np.argmax(expected / cost_ms))  # argmax returns the first of equal maxima


def admit_top_k(survival: ArrayLike, k: int) -> np.ndarray:
    """Admit the first k candidates of the admission order.

    Args:
        survival: [S, G] as in `admit_early_stop`.
        k: drafts to admit in total; all with survival > 0 where fewer than k exist.

    Returns:
        [S] int32 number of drafts admitted for each request.

    Raises:
        ValueError: rows that increase or leave [0, 1], or a negative k.
        TypeError: k is not an integer.
    """
    wanted = operator.index(k)
    if wanted < 0:
        raise ValueError(f"k: a number of drafts is at least 0, got {wanted}")
    rows = _survival_rows(survival)
    values = _candidates(rows)
    return _lengths(rows, values, min(wanted, values.size))


def admit_threshold(conditional: Any, threshold: Any) -> Any:
    """Cut each row before the first position whose conditional acceptance probability is below the threshold.

    DeepSpec's rule: per position, not cumulative, and one low position ends the row whatever follows.

    Args:
        conditional: [..., G] probabilities, a NumPy or a JAX array (works under jit).
        threshold: positions with a probability equal to it are kept.

    Returns:
        [...] int32 lengths, of the same library as the input.
    """
    keep = (conditional >= threshold).astype("int32")
    return keep.cumprod(axis=-1).sum(axis=-1).astype("int32")


def survival_device(conditional: jax.Array) -> jax.Array:
    """`survival` for use inside a jitted step.

    The product is taken from left to right. `jnp.cumprod` may group the factors otherwise, and then rounding
    lets a row increase by one unit in the last place, which the host functions refuse.

    Args:
        conditional: [S, G] conditional acceptance probabilities. NaN counts as 0: nothing is admitted on the word
            of a drafter whose numbers are not finite, and its row does not disturb the order of the others.

    Returns:
        [S, G] of the same dtype, rows non-increasing.
    """
    conditional = jnp.where(jnp.isnan(conditional), 0, conditional)
    columns = [conditional[:, 0]] if conditional.shape[1] else []
    for k in range(1, conditional.shape[1]):
        columns.append(columns[-1] * conditional[:, k])
    return jnp.stack(columns, axis=1) if columns else conditional


def admit_top_k_device(survival: jax.Array, k: jax.Array | int) -> jax.Array:
    """`admit_top_k` for use inside a jitted step; the values are not checked.

    Args:
        survival: [S, G] non-increasing rows; rows that must get nothing are zeros.
        k: int32 scalar, may be traced.

    Returns:
        [S] int32 lengths, in the same order of ties as on the host.
    """
    slots, width = survival.shape
    if slots * width == 0:
        return jnp.zeros(slots, jnp.int32)
    descending = jnp.sort(survival.reshape(-1), descending=True)
    available = jnp.sum(survival > 0, dtype=jnp.int32)
    admitted = jnp.clip(jnp.asarray(k, jnp.int32), 0, available)
    last = descending[jnp.maximum(admitted - 1, 0)]
    # Values above the last one admitted are all in; those equal to it fill what is left, slot by slot.
    above = jnp.sum(survival > last, axis=1, dtype=jnp.int32)
    equal = jnp.sum(survival == last, axis=1, dtype=jnp.int32)
    left = admitted - jnp.sum(above) - (jnp.cumsum(equal) - equal)
    return jnp.where(admitted > 0, above + jnp.clip(left, 0, equal), 0)


def admit_early_stop_device(
    survival: jax.Array, milliseconds_by_tokens: jax.Array, draft_ms: jax.Array | float, active: jax.Array
) -> jax.Array:
    """Algorithm 1 for use inside a jitted step; in float32, near ties of theta may differ from the host's.

    Args:
        survival: [S, G] non-increasing rows; the values are not checked.
        milliseconds_by_tokens: [M] step times of 0..M-1 tokens, infinite beyond the table's last entry
            (`StepTimeTable.dense`). Counts of M or more are taken as infinite too.
        draft_ms: scalar, milliseconds of the draft, already spent.
        active: [S] bool; other rows neither count in R nor get drafts.

    Returns:
        [S] int32 lengths.
    """
    slots, width = survival.shape
    if slots * width == 0:
        return jnp.zeros(slots, jnp.int32)
    rows = jnp.where(active[:, None], survival, jnp.zeros_like(survival))
    requests = jnp.sum(active, dtype=jnp.int32)
    values = jnp.sort(rows.reshape(-1), descending=True)
    gained = jnp.concatenate([jnp.zeros_like(values[:1]), jnp.cumsum(values)])
    expected = requests.astype(values.dtype) + gained  # [S*G + 1]
    tokens = requests + jnp.arange(values.size + 1, dtype=jnp.int32)
    step_ms = jnp.asarray(milliseconds_by_tokens).at[tokens].get(mode="fill", fill_value=jnp.inf)
    theta = expected / (draft_ms + step_ms)
    goes_on = (theta[1:] > theta[:-1]) & (values > 0)
    admitted = jnp.where(goes_on.all(), values.size, jnp.argmin(goes_on)).astype(jnp.int32)
    return admit_top_k_device(rows, admitted)


def _as_float_rows(values: ArrayLike, name: str) -> np.ndarray:
    rows = np.asarray(values)
    if rows.ndim != 2:
        raise ValueError(f"{name}: shape [S, G] expected, got {list(rows.shape)}")
    # float32 stays float32 until after the sort: the order is the same and sorting is faster.
    return rows if rows.dtype in (np.float32, np.float64) else rows.astype(np.float64)


def _survival_rows(survival: ArrayLike) -> np.ndarray:
    """[S, G] checked. Of non-increasing rows only the ends need comparing with 0 and 1; NaN fails."""
    rows = _as_float_rows(survival, "survival")
    if not rows.size:
        return rows
    falling = rows[:, 1:] <= rows[:, :-1]
    if not (falling.all() and (rows[:, 0] <= 1.0).all() and (rows[:, -1] >= 0.0).all()):
        inside = (rows >= 0.0) & (rows <= 1.0)
        if not inside.all():
            slot, position = np.argwhere(~inside)[0]
            raise ValueError(f"survival[{slot}, {position}] = {rows[slot, position]}: every entry must be in [0, 1]")
        slot, position = np.argwhere(~falling)[0]
        raise ValueError(
            f"survival[{slot}]: rows must be non-increasing, but position {position + 1} has "
            f"{rows[slot, position + 1]} after {rows[slot, position]} (conditional ones? see survival())"
        )
    return rows


def _candidates(rows: np.ndarray) -> np.ndarray:
    """Positive survivals in the order of admission, [n]: for theta only the values matter."""
    ascending = np.sort(rows, axis=None)
    return ascending[np.searchsorted(ascending, 0, side="right") :][::-1]


def _admission_path(
    requests: int, values: np.ndarray, table: StepTimeTable, draft_ms: float, other_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Expected tokens and step milliseconds after 0, 1, 2, ... admissions, each [n + 1] at most."""
    if not (math.isfinite(draft_ms) and draft_ms >= 0.0):
        raise ValueError(f"draft_ms: a finite number of milliseconds >= 0 expected, got {draft_ms}")
    others = operator.index(other_tokens)
    if others < 0:
        raise ValueError(f"other_tokens: at least 0, got {others}")
    first = requests + others
    if first > table.last:
        extra = f" + {others} other tokens" if others else ""
        raise ValueError(
            f"R = {requests} requests{extra} are beyond the last entry of the step-time table ({table.last} tokens)"
        )
    step_ms = table.window(first, values.size + 1)
    expected = np.empty(step_ms.size)
    expected[0] = requests
    expected[1:] = values[: step_ms.size - 1]
    # Summed one by one from R on, in the order of admission: bit for bit what a literal loop computes.
    return np.cumsum(expected, out=expected), step_ms


def _lengths(rows: np.ndarray, values: np.ndarray, admitted: int) -> np.ndarray:
    """Row lengths when the first `admitted` candidates are in, from the last value admitted and its ties."""
    if admitted == 0:
        return np.zeros(rows.shape[0], np.int32)
    last = values[admitted - 1]
    if admitted == values.size or values[admitted] < last:  # all that equal the last one are in: the usual case
        return np.count_nonzero(rows >= last, axis=1).astype(np.int32)
    above = np.count_nonzero(rows > last, axis=1)
    equal = np.count_nonzero(rows == last, axis=1)
    left = admitted - above.sum() - (np.cumsum(equal) - equal)
    return (above + np.clip(left, 0, equal)).astype(np.int32)
