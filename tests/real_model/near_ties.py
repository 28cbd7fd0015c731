"""Token-exact claims on a real model in float32 (DESIGN section 8).

Two programs of different shape add in different orders, so their logits differ by up to 2e-4 and may part at a near
tie. A difference is excused only where the plain decoder's own gap between the two tokens, after noise and
temperature, is below 1e-3 / T (1e-3 at T = 0); the rest of that text is not compared. At most 2 excuses in 10,000
tokens; every one is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.layout import dense_layout
from dspark_jax.noise import NoiseKey, gumbel, row_bits
from dspark_jax.targets import Target
from dspark_jax.types import EMPTY, GREEDY_TEMPERATURE


@dataclasses.dataclass
class Comparison:
    """Running count over many texts."""

    target: Target
    temperature: float = 0.0
    compared: int = 0
    excuses: int = 0

    def texts(self, prompt: Sequence[int], plain: np.ndarray, other: np.ndarray, seed: int = 0) -> None:
        """Compares two generated texts (EMPTY-padded) of one prompt; raises AssertionError on a real difference."""
        plain, other = plain[plain != EMPTY], other[other != EMPTY]
        n = min(len(plain), len(other))
        differ = np.flatnonzero(plain[:n] != other[:n])
        if not len(differ):
            assert len(plain) == len(other), f"lengths {len(plain)} and {len(other)} with equal tokens"
            self.compared += n
            return
        at = int(differ[0])
        self.compared += at
        scores = self._scores([*prompt, *plain[:at].tolist()], seed)
        gap = abs(float(scores[plain[at]] - scores[other[at]]))
        cold = self.temperature < GREEDY_TEMPERATURE
        limit = 1e-3 if cold else 1e-3 / self.temperature
        print(f"texts part at token {at}: {plain[at]} and {other[at]}, gap {gap:.2e} (limit {limit:.0e})")
        assert gap < limit, f"texts part at token {at} with a gap of {gap:.3e}: not a near tie"
        self.excuses += 1

    def finish(self) -> None:
        """Asserts the limit on excuses: 2 in 10,000 tokens, and at least one allowed in a short comparison."""
        print(f"{self.compared} tokens compared, {self.excuses} near ties excused")
        assert self.excuses <= max(1, round(2e-4 * self.compared))

    def _scores(self, ids: list[int], seed: int) -> np.ndarray:
        """What plain decoding takes the arg-max of for the token after ``ids``."""
        logits = last_logits(self.target, ids)
        if self.temperature < GREEDY_TEMPERATURE:
            return logits
        key = NoiseKey(*(jnp.asarray([x]) for x in (np.uint32(seed), len(ids), 0, 0)))
        noise = gumbel(row_bits(key, jnp.arange(len(logits))), jnp.dtype(jnp.float32))[0]
        return np.asarray(jax.nn.log_softmax(jnp.asarray(logits) / self.temperature) + noise)


def all_logits(target: Target, ids: Sequence[int]) -> np.ndarray:
    """Logits ``[n, V]`` of a text, by one prefill."""
    n = len(ids)
    cells = -(-(n + 1) // 64) * 64  # few shapes, few compilations
    tokens = jnp.zeros(cells, jnp.int32).at[:n].set(jnp.asarray(ids))
    return np.asarray(_prefill_logits(target, tokens))[:n]


def last_logits(target: Target, ids: Sequence[int]) -> np.ndarray:
    """Logits ``[V]`` of the token after a text."""
    return all_logits(target, ids)[-1]


@jax.jit
def _prefill_logits(target: Target, tokens: jax.Array) -> jax.Array:
    size = tokens.shape[0]
    layout = dense_layout(jnp.zeros(1, jnp.int32), jnp.full(1, size), size)
    hidden, _, _ = target.forward(tokens, layout, target.init_cache(1, size))
    return target.unembed(hidden)
