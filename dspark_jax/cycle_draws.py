"""How a cycle draws: the drafts of a block, the target's rows, and the verdict on the one by the other.

Two ways, one law. The plain one makes whole log-probabilities and asks the ``Noise`` for indices: any device, any
float type, every rule, filter and scripted noise. The fused one leaves both passes over the vocabulary to
``pallas_kernels`` (``markov_sample``, ``verify``), which make no ``[R, G, V]`` or ``[T, V]`` array of probabilities at
all. See ``Static.fused`` for when it is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.drafters.base import DrafterModel, Numbers, Proposal
from dspark_jax.layout import Layout
from dspark_jax.logit_rule import LogitRule
from dspark_jax.noise import ACCEPT, DRAFT, HASH_NOISE, RESIDUAL, Noise, key_words
from dspark_jax.sampling import log_probs
from dspark_jax.types import Array, PyTree, cond
from dspark_jax.verify import Drafts, RowKeys, Verdict, choose, cycle_key, draw_undrafted, emitted, plain_key, verify
from pallas_kernels import verify as kernel
from pallas_kernels.dispatch import BackendError

if TYPE_CHECKING:
    from dspark_jax.cycle import DecodeState


class Static(flax.struct.PyTreeNode):
    """The parts of a cycle that are not data: how noise is made, which logit rule holds, which backend draws.

    ``fused``: None takes the kernels of the device that is traced for (Hopper, TPU), and the plain way on every other;
    a name (``mosaic_gpu``, ``tpu``, ``xla``: the kernels' reference) means that one or ``BackendError``. Whatever it
    says, these go the plain way: a logit rule, noise that is not the hash, float64, models spread over several devices,
    cycles without drafts, prefill, and, decided on the device from cycle to cycle, batches in which a row asks for
    top-k, top-p or min-p. Of drafters only the block drafter with a Markov head has a fused draft; a chain's drafts
    are drawn the plain way and verified the fused one.
    """

    noise: Noise = flax.struct.field(pytree_node=False, default=HASH_NOISE)
    rule: LogitRule | None = flax.struct.field(pytree_node=False, default=None)
    fused: str | None = flax.struct.field(pytree_node=False, default=None)
    interpret: Any = flax.struct.field(pytree_node=False, default=None)  # parameters of the backend's interpreter

    @property
    def hashed(self) -> bool:
        """Draws are nothing but the hash and the logits, so a kernel can make them.

        Raises BackendError where they are not, and ``fused`` names a backend.
        """
        if self.rule is None and self.noise == HASH_NOISE:
            return True
        if self.fused is not None:
            raise BackendError(
                f"backend {self.fused!r} draws by the hash alone: it takes no logit rule and no other noise"
            )
        return False


def row_keys(view: DecodeState) -> RowKeys:
    """What keys the numbers of the rows of ``view``."""
    return RowKeys(view.seed, view.cycle, view.length, view.coupled, view.sampling.greedy)


class DraftSampler:
    """Draws the drafts of a block: rule, distribution, noise, and the step from draft to target ids."""

    def __init__(self, view: DecodeState, drafter: DrafterModel, static: Static) -> None:
        self.view, self.static, self.d2t = view, static, drafter.d2t
        self.keys = row_keys(view)
        self.rows = jnp.arange(view.seed.shape[0])

    def start(self) -> PyTree:
        """The rule's state at the anchor."""
        return self.view.rule

    def _key(self, k: Array | int) -> Any:
        offset = jnp.broadcast_to(jnp.asarray(k, jnp.int32), self.rows.shape)
        shared = plain_key(self.keys, self.rows, offset)  # the target's own numbers at this position
        own = cycle_key(self.keys, offset, DRAFT)
        return jax.tree.map(lambda a, b: jnp.where(self.keys.coupled, a, b), shared, own)

    def draw(self, state: PyTree, logits: Array, k: Array | int) -> tuple[Array, Array, Array, PyTree]:
        """See ``drafters.base.Sampler``."""
        if self.static.rule is not None:
            logits = self.static.rule.apply(state, logits, self.d2t)
        log_q = log_probs(logits, self.view.sampling)
        index = self.static.noise.categorical(log_q, self._key(k), self.d2t, self.keys.greedy)
        token = index if self.d2t is None else self.d2t[index].astype(jnp.int32)
        if self.static.rule is not None:
            state = self.static.rule.advance(state, token, jnp.ones(token.shape, bool))
        return token, index, log_q[self.rows, index], state

    def numbers(self, places: int) -> Numbers | None:
        """See ``drafters.base.Sampler``."""
        if not self.static.hashed:
            return None
        words = [key_words(self._key(k)) for k in range(places)]
        word0, word1 = (jnp.stack(column) for column in zip(*words, strict=True))
        sampling = self.view.sampling
        return Numbers(
            sampling.temperature, word0, word1, jnp.any(sampling.filtered), self.static.fused, self.static.interpret
        )


def _rule_states(view: DecodeState, drafted: Array, static: Static) -> PyTree:
    """``[R, G + 1, ...]``: the rule's state after the anchor and after each of the drafts ``[R, G]``."""
    states, everyone = [view.rule], jnp.ones(drafted.shape[0], bool)
    for k in range(drafted.shape[1]):
        states.append(static.rule.advance(states[-1], drafted[:, k], everyone))  # type: ignore[union-attr]
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *states)


def draft_law(drafter: DrafterModel, view: DecodeState, proposal: Proposal, place: Array, static: Static) -> Array:
    """``[R, Vd]``: log-probabilities of the distribution that draft ``place [R]`` of each row was drawn from, rebuilt.

    Args:
        view: the rows of the proposal, as they were when it was drafted.
    """
    logits = drafter.row_logits(proposal, place)
    if static.rule is not None:
        rows = jnp.arange(place.shape[0])
        states = jax.tree.map(lambda a: a[rows, place], _rule_states(view, proposal.tokens, static))
        logits = static.rule.apply(states, logits, drafter.d2t)
    return log_probs(logits, view.sampling)


def target_law(view: DecodeState, logits: Array, drafted: Array, layout: Layout, static: Static) -> Array:
    """``[T, V]`` log-probabilities: each row as plain decoding would compute it after the drafts before it."""
    if static.rule is not None:
        states = jax.tree.map(layout.flatten, _rule_states(view, drafted, static))
        logits = static.rule.apply(states, logits, None)
    return log_probs(logits, view.sampling.take(layout.row))


def judge(
    drafter: DrafterModel | None,
    view: DecodeState,
    log_p: Array,
    layout: Layout,
    proposal: Proposal | None,
    admitted: Array,
    static: Static,
) -> tuple[Verdict, Array]:
    """The plain way, from the target's log-probabilities ``[T, V]``: the verdict, and ``sound`` as ``commit`` takes
    it."""
    keys = row_keys(view)
    if drafter is None:
        # Plain decoding: the numbers of `coupled`, whatever the request's rule.
        keys = keys.replace(coupled=jnp.ones_like(keys.coupled))
    if proposal is None:
        choice = layout.pad(choose(log_p, layout, keys, static.noise))[:, 0]
        if drafter is not None:
            choice = draw_undrafted(choice, log_p, layout, keys, static.noise)
        verdict, tokens = Verdict(jnp.zeros(choice.shape, jnp.int32), choice), choice[:, None][:, :0]
    else:
        tokens = proposal.tokens[:, : layout.width - 1]
        drafts, q_row = Drafts(proposal.tokens, proposal.log_q), _q_row(drafter, view, proposal, log_p.shape[1], static)
        verdict = verify(log_p, layout, drafts, admitted, keys, static.noise, q_row)
    return verdict, ~jnp.isnan(log_p[layout.index, emitted(verdict, tokens)])


def _q_row(drafter: Any, view: DecodeState, proposal: Proposal, vocab: int, static: Static) -> Any:
    """See ``verify.QRow``."""

    def q_row(place: Array) -> Array:
        row = draft_law(drafter, view, proposal, place, static)
        if drafter.d2t is None:
            return row
        return jnp.full((row.shape[0], vocab), -jnp.inf, row.dtype).at[:, drafter.d2t].set(row)

    return q_row


def decide(
    drafter: DrafterModel | None,
    view: DecodeState,
    logits: Array,
    layout: Layout,
    proposal: Proposal | None,
    admitted: Array,
    static: Static,
    spread: bool,
) -> tuple[Verdict, Array]:
    """The verdict from the target's logits ``[T, V]``, the fused way where there is one; and ``sound``. ``spread``: the
    logits come from several devices."""
    tokens = jnp.zeros((admitted.shape[0], 0), jnp.int32) if proposal is None else proposal.tokens
    tokens = tokens[:, : layout.width - 1]

    def plain() -> tuple[Verdict, Array]:
        log_p = target_law(view, logits, tokens, layout, static)
        return judge(drafter, view, log_p, layout, proposal, admitted, static)

    if proposal is None or drafter is None or tokens.shape[1] == 0 or not static.hashed:
        return plain()
    rows, requests = _kernel_arguments(view, logits, layout, tokens, proposal.log_q, admitted)
    name = kernel.backend(rows, implementation=static.fused, interpret=static.interpret, spread=spread)
    if name == "xla" and static.fused is None:
        return plain()

    def fused() -> tuple[Verdict, Array]:
        q_row = _q_row(drafter, view, proposal, logits.shape[1], static)
        out = kernel.verify(rows, requests, q_row, implementation=name, interpret=static.interpret)
        return Verdict(out.accepted, out.next_token), out.sound[layout.index]

    return cond(jnp.any(view.sampling.filtered), plain, fused)


def _kernel_arguments(
    view: DecodeState, logits: Array, layout: Layout, tokens: Array, log_q: Array, admitted: Array
) -> tuple[kernel.Rows, kernel.Requests]:
    """What ``pallas_kernels.verify`` takes, with the keys of both rules."""
    keys, (rows, drafts) = row_keys(view), tokens.shape
    temperature = jnp.where(keys.greedy, 1.0, view.sampling.temperature).astype(jnp.float32)
    none = jnp.full((rows, 1), -1, jnp.int32)
    flat = kernel.Rows(
        logits,
        (1.0 / temperature)[layout.row],
        (keys.coupled & ~keys.greedy)[layout.row].astype(jnp.float32),
        *key_words(plain_key(keys, layout.row, layout.offset)),
        layout.flatten(jnp.concatenate([tokens, none], axis=1)),
    )

    def words(places: int, purpose: int) -> list[Array]:
        columns = [key_words(cycle_key(keys, jnp.full(rows, k), purpose)) for k in range(places)]
        return [jnp.stack(column, axis=1) for column in zip(*columns, strict=True)]

    accept, draw = words(drafts, ACCEPT), words(drafts + 1, RESIDUAL)
    deciding = keys.coupled | keys.greedy
    requests = kernel.Requests(layout.index, tokens, log_q[:, :drafts], admitted, deciding, *accept, *draw)
    return flat, requests
