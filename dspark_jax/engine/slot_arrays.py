"""The small arrays of one slot, as numbers of the host: what a program is given to set a slot up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.config import Sampling
from dspark_jax.cycle import DecodeState
from dspark_jax.engine.slots import Tenant
from dspark_jax.sampling import sampling_row
from dspark_jax.types import EMPTY


class SlotArrays:
    """Makes them. ``stop_ids``: places for stop tokens."""

    def __init__(self, stop_ids: int) -> None:
        self._stop_ids = stop_ids

    def idle(self) -> DecodeState:
        """The small arrays of an idle slot.

        Its temperature is 0, so that a batch of greedy requests skips the noise although slots are idle: the tests
        for that ask *all* rows. With 1, a common choice for padding, one idle slot would have noise made for all
        (tests/engine/test_slots.py): 0.8 ms more a place of every block, 8 rows of 49,152 on one CPU core. Nothing
        divides by it (``log_probs`` takes 1 for greedy rows), every row reads its own settings only, and padding tokens
        those of a row whose results are dropped. So no value here could reach a real row; tests/law/test_layouts.py
        tries wild ones at temperature > 0.
        """
        return self._small(0, False, 0, 0.0, 0, 1.0, 0.0, ())

    def values(self, tenant: Tenant, length: int = 0, *, resumed: bool = False) -> DecodeState:
        """The small arrays of a slot that holds ``length`` tokens of its tenant's text. ``resumed``: all of it, and
        the tenant goes on decoding where it was interrupted."""
        request, s = tenant.request, tenant.request.sampling
        small = self._small(
            tenant.seed,
            request.coupled,
            request.limit - len(tenant.tokens),
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            request.stop_ids,
        ).replace(length=np.int32(length))
        if not resumed:
            return small
        return small.replace(anchor=np.int32(tenant.tokens[-1]), active=np.bool_(True), cycle=np.int32(tenant.cycle))

    def busy(self, temperature: float) -> DecodeState:
        """The small arrays of a slot that decodes and has no end in sight."""
        return self._small(1, False, 2**30, temperature, 0, 1.0, 0.0, ())

    def _small(
        self,
        seed: int,
        coupled: bool,
        remaining: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        stops: Sequence[int],
    ) -> DecodeState:
        stop_ids = np.full(self._stop_ids, EMPTY, np.int32)
        stop_ids[: len(stops)] = stops
        values: dict[str, Any] = {
            "length": np.int32(0),
            "anchor": np.int32(0),
            "active": np.bool_(False),
            "seed": np.uint32(seed),
            "cycle": np.int32(0),
            "coupled": np.bool_(coupled),
            "remaining": np.int32(remaining),
            "stop_ids": stop_ids,
            "sampling": sampling_row(Sampling(temperature, top_k, top_p, min_p)),
        }
        return DecodeState(**values, rule=None, target=None, draft=None)
