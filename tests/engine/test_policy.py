"""What decides the number of drafts: old scores and step times only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_jax.calibrate import sts
from dspark_jax.config import Sampling
from dspark_jax.engine import EngineConfig
from dspark_jax.engine.policy import PRIOR, Lagged, Temperatures, choose_policy
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import Tenant
from dspark_jax.schedule import StepTimeTable, capacity
from tests.engine.cases import step_times


class Drafter:
    def __init__(self, has_confidence: bool = True) -> None:
        self.block_size, self.max_drafts, self.has_confidence = 3, 3, has_confidence


def tenant(number: int, **request: Any) -> Tenant:
    values: dict[str, Any] = {"prompt": (1,), "limit": 5, "sampling": Sampling(), "seed": None, "coupled": False}
    return Tenant(number, Checked(**{**values, **request}, stop_ids=()), number)


STEEP = StepTimeTable(tokens=[2, 9], milliseconds=[1.0, 1e6])  # no draft ever pays


def test_capacity_uses_scores_that_are_two_cycles_old() -> None:
    """What cycles n - 1 and n saw does not exist yet for cycle n."""
    policy, t, table = Lagged(3), tenant(0), step_times()
    rows = {0: [0.9, 0.8, 0.7], 1: [0.3, 0.1, 0.0], 2: [0.95, 0.9, 0.9], 3: [0.0, 0.0, 0.0]}
    for cycle, row in rows.items():
        policy.observe(cycle, [(t, np.array(row))])
        if cycle >= 1:
            wanted = capacity(np.array([rows[cycle - 1]]), table, 0.1)
            assert policy.capacity(cycle + 1, [t], table) == wanted


def test_a_new_tenant_starts_from_the_prior() -> None:
    """Never from what others or its slot saw in the last two cycles; older scores move the prior."""
    policy, table = Lagged(3), step_times()
    prior = PRIOR ** np.arange(1, 4)
    new = tenant(1)
    assert policy.capacity(0, [new], table) == capacity(prior[None], table, 0.1)
    policy.observe(0, [(tenant(0), np.zeros(3))])
    assert policy.capacity(1, [new], table) == capacity(prior[None], table, 0.1)
    np.testing.assert_array_equal(policy._prior, prior)
    policy.capacity(2, [new], table)
    np.testing.assert_allclose(policy._prior, 0.9 * prior)


def test_skipped_drafts_are_probed_again() -> None:
    """After 8, 16, 32, then every 64 cycles; without a probe there would never be a score again."""
    policy = Lagged(3)
    drafts = [policy.capacity(n, [tenant(0), tenant(1)], STEEP) for n in range(300)]
    assert np.flatnonzero(drafts).tolist() == [7, 23, 55, 119, 183, 247]
    assert set(drafts) == {0, 2}


@pytest.mark.parametrize(
    ("config", "drafter", "mode", "note"),
    [
        ({}, None, "none", "no drafter"),
        ({"mode": "none"}, Drafter(), "none", None),
        ({"mode": "fixed"}, Drafter(), "fixed", None),
        ({}, Drafter(), "fixed", "no step-time table"),
        ({"step_time": STEEP}, Drafter(False), "fixed", "no confidence head"),
        ({"step_time": STEEP}, Drafter(), "lagged", None),
        ({"mode": "early_stop", "step_time": STEEP}, Drafter(), "early_stop", "do not overlap"),
        ({"mode": "early_stop", "step_time": STEEP, "overlap": False}, Drafter(), "early_stop", None),
        ({"mode": "early_stop"}, Drafter(), "fixed", "no step-time table"),
        ({"mode": "current", "step_time": STEEP}, Drafter(), "lagged", "current"),
        ({"mode": "threshold"}, Drafter(), "threshold", "do not overlap"),
    ],
)
def test_what_cannot_run_is_replaced_and_said(
    config: dict[str, Any], drafter: Drafter | None, mode: str, note: str | None
) -> None:
    found, policy, notes = choose_policy(EngineConfig(**config), drafter)
    assert found == mode and policy.drafts == (0 if mode == "none" else 3)
    assert bool(notes) == (note is not None) and (note or "") in " ".join(notes)


@pytest.mark.parametrize(
    ("config", "drafter", "message"),
    [
        ({"mode": "threshold"}, Drafter(False), "'threshold' needs a drafter with a confidence head"),
        ({"mode": "fixed", "num_speculative_tokens": 4}, Drafter(), r"num_speculative_tokens must lie in 1\.\.3"),
    ],
)
def test_what_has_no_replacement_is_an_error(config: dict[str, Any], drafter: Drafter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_policy(EngineConfig(**config), drafter)


def test_the_calibration_is_picked_for_each_request() -> None:
    """T = 0 requests take the T = 0 table, others their rule's; no table means raw confidences."""
    tables = sts.CalibrationTables(
        tuple(
            sts.Calibration(np.full(3, value), verification=rule, sampling_temperature=at)
            for value, rule, at in ((2.0, "rejection", 1.0), (3.0, "rejection", 0.0))
        )
    )
    temperatures = Temperatures(tables, 2)
    np.testing.assert_array_equal(temperatures.of(tenant(0).request), [2.0, 2.0])
    np.testing.assert_array_equal(temperatures.of(tenant(0, sampling=Sampling(0.0)).request), [3.0, 3.0])
    assert temperatures.of(tenant(0, coupled=True).request) == 1.0
    assert Temperatures(None, 2).of(tenant(0).request) == 1.0
    with pytest.raises(ValueError, match="calibration: 3 temperatures for blocks of 4 drafts"):
        Temperatures(tables, 4)
