"""Batch decoding inside one jitted program: the research entry point (DESIGN section 9)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState, Static, TargetModel
from dspark_jax.drafters.base import DrafterModel, Proposal, drafts_of_block
from dspark_jax.noise import distinct_seeds
from dspark_jax.schedule.prefix import admit_early_stop_device, survival_device
from dspark_jax.sharding import mesh_of, spread, tracing_on
from dspark_jax.types import EMPTY, GREEDY_TEMPERATURE, Array, concrete
from dspark_jax.verify import Commit

LOG = logging.getLogger("dspark_jax.generate")

RULES = ("rejection", "coupled")
ADMIT = ("all", "threshold", "early_stop")
PREFILL_PIECE = 512
"""Prompts are run in pieces of at most this many tokens a row."""


class GenerateOutput(flax.struct.PyTreeNode):
    """What ``generate`` returns. Invariant: ``1 + committed.sum(1) == lengths``."""

    tokens: Array  # [B, N] int32; a stop token is kept as the last one, EMPTY after it
    lengths: Array  # [B] int32: tokens kept, the first one (from prefill) and a stop token included; a row whose
    # logits are not finite ends before the token they are for, 0 tokens where that is its first
    committed: Array  # [B, C] int32: tokens kept of each cycle, 0 past the last
    offered: Array  # [B, C] int32: drafts verified in each cycle
    accepted: Array  # [B, C] int32: drafts accepted in each cycle, of those offered


def generate(
    target: TargetModel,
    drafter: DrafterModel | None,
    prompts: Array,
    lengths: Array,
    *,
    seeds: Array,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    verification: str = "rejection",
    num_speculative_tokens: int | None = None,
    admit: str = "all",
    confidence_threshold: float = 0.0,
    calibration: Any = None,
    step_time: Any = None,
    stop_token_ids: Sequence[int] = (),
    static: Static = Static(),  # noqa: B008 - frozen
) -> GenerateOutput:
    """Decodes B prompts to ``max_new_tokens`` tokens each, or to a stop token.

    May be jitted: ``jax.jit(partial(generate, max_new_tokens=64))(target, drafter, prompts, lengths, seeds=seeds)``.

    Args:
        target: a loaded ``Target`` (or scripted model). drafter: a ``Drafter``, or None for plain decoding.
        prompts: ``[B, P]`` int32, right-padded; pad ids are ignored. lengths: ``[B]`` int32, 1..P.
        seeds: ``[B]`` uint32.
        max_new_tokens: N >= 1, static.
        sampling: one setting for all rows, or one for each (static).
        verification: ``rejection`` or ``coupled``; plain decoding with the same seed gives the text of ``coupled``.
        num_speculative_tokens: drafts a block; None: the checkpoint's block (EAGLE-3: ``ttt_length``, MTP: 1).
        admit: ``all``; ``threshold`` (cut before the first position whose raw sigmoid(confidence) is below
            ``confidence_threshold``); ``early_stop`` (Algorithm 1 of the paper, needs ``step_time``). The verify
            width is static here: ``admit`` changes what is offered, not the speed.
        calibration: a Calibration for ``early_stop``; None: the drafter's own if it has one, else raw confidences.
        step_time: a StepTimeTable.
        stop_token_ids: tokens that end a row.

    Raises:
        ValueError: naming the argument and the remedy.
    """
    prompts, lengths, seeds = _integers("prompts", prompts), _integers("lengths", lengths), _integers("seeds", seeds)
    k = _check(target, drafter, prompts, lengths, max_new_tokens, verification, num_speculative_tokens)
    if seeds.shape != lengths.shape:
        raise ValueError(f"seeds must be [B] like lengths, found {seeds.shape} for {lengths.shape}")
    if not isinstance(sampling, Sampling):
        sampling = tuple(sampling)  # static, so hashable
        if len(sampling) != prompts.shape[0]:
            raise ValueError(f"sampling must be one setting or one a row, found {len(sampling)} for {prompts.shape[0]}")
    _check_admission(drafter, admit, confidence_threshold, step_time, prompts.shape[0])
    milliseconds: Any = None
    draft_ms = 0.0
    if admit == "early_stop":
        rows = prompts.shape[0]
        milliseconds = np.asarray(step_time.dense(rows * (k + 1)), np.float32)
        draft_ms = float(getattr(step_time, "draft_ms", 0.0) or 0.0)
        calibration = getattr(drafter, "calibration", None) if calibration is None else calibration
        calibration = _pick_table(calibration, verification, sampling)
    # A threshold may be traced; where several processes compute, plain numbers are every process's own.
    threshold: Any = jnp.asarray(confidence_threshold, jnp.float32)
    traced = isinstance(prompts, jax.core.Tracer)
    mesh = None if traced else mesh_of(target)
    threshold = threshold if mesh is None else np.asarray(threshold)
    run: Callable[..., GenerateOutput] = _generate if traced else _compiled(mesh)
    return run(
        target,
        drafter,
        _rows(prompts, jnp.int32, mesh),
        _rows(lengths, jnp.int32, mesh),
        _rows(seeds, jnp.uint32, mesh),
        np.asarray(tuple(stop_token_ids) or (EMPTY,), np.int32),
        milliseconds,
        threshold,
        calibration if admit == "early_stop" else None,
        max_new_tokens=int(max_new_tokens),
        sampling=sampling,
        coupled=verification == "coupled",
        num_drafts=k,
        admit=admit,
        draft_ms=draft_ms,
        static=static,
    )


def _rows(values: Array, dtype: Any, mesh: Mesh | None) -> Array:
    """``[B, ...]`` where the weights are; its rows are split over a mesh axis ``data`` that divides them."""
    if mesh is None:
        return jnp.asarray(values, dtype)
    split = "data" in mesh.axis_names and values.shape[0] % mesh.shape["data"] == 0
    return spread(np.asarray(values).astype(dtype), NamedSharding(mesh, PartitionSpec("data" if split else None)))


def _integers(name: str, values: Any) -> Any:
    """An integer array as given (seeds may need all 32 bits, so lists are not narrowed on the way)."""
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer) and array.size:
        raise ValueError(f"{name} must be integers, found {array.dtype}")
    return array


def _check(
    target: TargetModel,
    drafter: DrafterModel | None,
    prompts: Array,
    lengths: Array,
    max_new_tokens: int,
    verification: str,
    num_speculative_tokens: int | None,
) -> int:
    """Refuses what cannot be decoded; returns the drafts of a block (0 without a drafter)."""
    if prompts.ndim != 2 or lengths.shape != (prompts.shape[0],):
        raise ValueError(f"prompts must be [B, P] and lengths [B], found {prompts.shape} and {lengths.shape}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    if verification not in RULES:
        raise ValueError(f"verification must be one of {', '.join(RULES)}, found {verification!r}")
    known, known_prompts = concrete(lengths), concrete(prompts)
    if known is not None and ((known < 1).any() or (known > prompts.shape[1]).any()):
        raise ValueError(f"lengths must lie in 1..{prompts.shape[1]} (an empty prompt has no token to start from)")
    longest = 1 if known is None else int(known.max(initial=0))  # traced: only what is certain is refused
    if longest + max_new_tokens > target.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the context window of "
            f"{target.max_positions} tokens: shorten the prompt or lower max_new_tokens"
        )
    vocab = getattr(target, "vocab_size", None)
    if known is not None and known_prompts is not None and vocab is not None:
        inside = np.arange(prompts.shape[1])[None, :] < known[:, None]
        bad = known_prompts[inside & ((known_prompts < 0) | (known_prompts >= vocab))]
        if bad.size:
            raise ValueError(f"prompts hold token id {int(bad[0])}, outside the vocabulary of {vocab}")
    if drafter is None:
        if num_speculative_tokens not in (None, 0):
            raise ValueError("num_speculative_tokens was given, but drafter is None")
        return 0
    return drafts_of_block(drafter, num_speculative_tokens)


def _check_admission(drafter: DrafterModel | None, admit: str, threshold: float, step_time: Any, rows: int) -> None:
    if admit not in ADMIT:
        raise ValueError(f"admit must be one of {', '.join(ADMIT)}, found {admit!r}")
    if admit == "all":
        return
    if drafter is None or not drafter.has_confidence:
        raise ValueError(f"admit={admit!r} needs a drafter with a confidence head")
    if admit == "early_stop" and step_time is None:
        raise ValueError("admit='early_stop' needs step_time, a StepTimeTable")
    if admit == "early_stop" and rows > step_time.last:
        raise ValueError(f"step_time ends at {step_time.last} tokens, fewer than the {rows} rows of prompts")
    if admit == "threshold" and not 0.0 <= float(threshold) <= 1.0:
        raise ValueError(f"confidence_threshold must lie in [0, 1], found {threshold}")


def _pick_table(calibration: Any, verification: str, sampling: Sampling | tuple[Sampling, ...]) -> Any:
    """The calibration that belongs to the requests: T = 0, or their rule's T = 1 table."""
    pick = getattr(calibration, "pick", None)
    if pick is None:
        return calibration
    settings = (sampling,) if isinstance(sampling, Sampling) else sampling
    greedy = {s.temperature < GREEDY_TEMPERATURE for s in settings}
    if len(greedy) > 1:
        raise ValueError("sampling mixes temperature 0 and others, which have different calibrations; pass calibration")
    temperature = 0.0 if greedy.pop() else 1.0
    table = pick(verification, temperature)
    if table is None:
        LOG.warning(
            "no calibration table for %s at temperature %g: raw confidences are used", verification, temperature
        )
    return table


class _Loop(flax.struct.PyTreeNode):
    """Carry of the decoding loop."""

    state: DecodeState
    cycles: Array  # [] int32
    made: Array  # [B] int32: tokens in ``tokens``
    tokens: Array  # [B, N]
    committed: Array  # [B, C]
    offered: Array  # [B, C]
    accepted: Array  # [B, C]


def _admitted(
    proposal: Proposal, active: Array, admit: str, threshold: Array, calibration: Any, ms: Any, draft_ms: float
) -> Array:
    """``[B]`` drafts each row offers, chosen without looking at the tokens they hold."""
    rows, k = proposal.tokens.shape
    if admit == "all":
        return jnp.full(rows, k, jnp.int32)
    logits: Any = proposal.confidence_logits  # there, as ``_check_admission`` has seen to
    if admit == "threshold":
        kept = (jax.nn.sigmoid(logits) >= threshold).astype(jnp.int32)
        return jnp.sum(jnp.cumprod(kept, axis=1), axis=1)
    conditional = jax.nn.sigmoid(logits) if calibration is None else calibration.apply(logits)
    survival = survival_device(conditional.astype(jnp.float32))
    return admit_early_stop_device(survival, ms, draft_ms, active)


def start_rows(
    target: TargetModel,
    drafter: DrafterModel | None,
    prompts: Array,
    seeds: Array,
    stop_ids: Array,
    *,
    max_new_tokens: int,
    sampling: Sampling | tuple[Sampling, ...],
    coupled: bool,
    width: int,
    rule_state: Any = None,
) -> DecodeState:
    """Empty slots, one for each row."""
    longest = prompts.shape[1]
    # A piece of prefill writes whole pieces, a block its whole width: room for both past the last token.
    piece = min(longest, PREFILL_PIECE)
    cells = max(-(-longest // piece) * piece, longest + max_new_tokens) + width
    return cycle.empty_rows(
        target,
        drafter,
        cells,
        seeds,
        stop_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        coupled=coupled,
        rule_state=rule_state,
    )


def prefill_rows(
    target: TargetModel,
    drafter: DrafterModel | None,
    state: DecodeState,
    prompts: Array,
    lengths: Array,
    static: Static,
) -> tuple[DecodeState, Array]:
    """All prompts, piece by piece; returns each row's first token ``[B, 1]``."""
    # Where lengths are traced nobody has checked them: a row then ends where the context window does.
    room = jnp.maximum(target.max_positions - lengths, 1)
    state = state.replace(remaining=jnp.minimum(state.remaining, room))
    longest = prompts.shape[1]
    piece = min(longest, PREFILL_PIECE)
    first = jnp.full((prompts.shape[0], 1), EMPTY, jnp.int32)
    for begin in range(0, longest, piece):
        tokens = prompts[:, begin : begin + piece]
        if tokens.shape[1] < piece:
            tokens = jnp.pad(tokens, ((0, 0), (0, piece - tokens.shape[1])))
        count = jnp.clip(lengths - begin, 0, piece)
        last = (lengths > begin) & (lengths <= begin + piece)
        state, result = cycle.prefill(target, drafter, state, tokens, count, last, context=begin + piece, static=static)
        first = jnp.where(last[:, None], result.tokens, first)
    return state, first


def _generate(
    target: TargetModel,
    drafter: DrafterModel | None,
    prompts: Array,
    lengths: Array,
    seeds: Array,
    stop_ids: Array,
    milliseconds: Array | None,
    threshold: Array,
    calibration: Any,
    *,
    max_new_tokens: int,
    sampling: Sampling | tuple[Sampling, ...],
    coupled: bool,
    num_drafts: int,
    admit: str,
    draft_ms: float,
    static: Static,
) -> GenerateOutput:
    rows, cycles = prompts.shape[0], max(max_new_tokens - 1, 1)
    prompts = jnp.where(jnp.arange(prompts.shape[1])[None, :] < lengths[:, None], prompts, 0)
    if admit == "early_stop" and not coupled:
        seeds = distinct_seeds(seeds)
    state = start_rows(
        target,
        drafter,
        prompts,
        seeds,
        stop_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        coupled=coupled,
        width=num_drafts + 1,
    )
    state, first = prefill_rows(target, drafter, state, prompts, lengths, static)
    tokens = jnp.full((rows, max_new_tokens), EMPTY, jnp.int32).at[:, :1].set(first)
    loop = _Loop(
        state=state,
        cycles=jnp.zeros((), jnp.int32),
        made=(first[:, 0] != EMPTY).astype(jnp.int32),
        tokens=tokens,
        committed=jnp.zeros((rows, cycles), jnp.int32),
        offered=jnp.zeros((rows, cycles), jnp.int32),
        accepted=jnp.zeros((rows, cycles), jnp.int32),
    )

    def body(loop: _Loop) -> _Loop:
        state, proposal, admitted = loop.state, None, None
        if drafter is not None:
            proposal = cycle.draft(drafter, state, num_drafts=num_drafts, static=static)
            admitted = _admitted(proposal, state.active, admit, threshold, calibration, milliseconds, draft_ms)
            admitted = jnp.minimum(admitted, cycle.window_limit(state, target.max_positions))
        state, result = cycle.step(target, drafter, state, proposal, admitted, static=static)
        return _record(loop.replace(state=state), result)

    loop = jax.lax.while_loop(lambda c: jnp.any(c.state.active) & (c.cycles < cycles), body, loop)
    return GenerateOutput(loop.tokens, loop.made, loop.committed, loop.offered, loop.accepted)


def _record(loop: _Loop, result: Commit) -> _Loop:
    """Appends a cycle's tokens and counts; a row's own cycles are its leading ones, since it never pauses."""
    rows, width = result.tokens.shape
    limit = loop.tokens.shape[1]
    place = loop.made[:, None] + jnp.arange(width)[None, :]
    place = jnp.where(jnp.arange(width)[None, :] < result.count[:, None], place, limit)
    tokens = loop.tokens.at[jnp.arange(rows)[:, None], place].set(result.tokens, mode="drop")
    return loop.replace(
        cycles=loop.cycles + 1,
        made=loop.made + result.count,
        tokens=tokens,
        committed=loop.committed.at[:, loop.cycles].set(result.count),
        offered=loop.offered.at[:, loop.cycles].set(result.offered),
        accepted=loop.accepted.at[:, loop.cycles].set(result.accepted),
    )


@functools.cache
def _compiled(mesh: Mesh | None) -> Callable[..., GenerateOutput]:
    """The jitted loop for weights on one device (None) or spread over a mesh; there every process gets all results."""

    @functools.wraps(_generate)
    def on_mesh(*arguments: Any, **options: Any) -> GenerateOutput:
        with tracing_on(mesh):
            return _generate(*arguments, **options)

    static = ("max_new_tokens", "sampling", "coupled", "num_drafts", "admit", "draft_ms", "static")
    if mesh is None:
        return jax.jit(_generate, static_argnames=static)
    return jax.jit(on_mesh, static_argnames=static, out_shardings=NamedSharding(mesh, PartitionSpec()))
