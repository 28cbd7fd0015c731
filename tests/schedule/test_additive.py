"""The additive model of step times: exact where it holds, monotone, and honest about where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_jax.schedule.additive import Step, fit

SMOLLM2 = {  # (slots, context): milliseconds of the plain step, then of verify steps by tokens
    (1, 512): (34.0, {4: 56.4, 8: 63.0}),
    (1, 2064): (40.4, {4: 70.2, 8: 75.0}),
    (4, 512): (67.3, {13: 144.0}),
    (4, 2064): (143.7, {13: 261.4}),
    (8, 512): (105.2, {24: 196.1}),
    (8, 2064): (183.1, {24: 356.4}),
}
"""Measured on two cores of an EPYC: a cell of four slots costs twelve times one of a single slot, that of eight only as
much again, and a block reads it about twice as slowly as one token does."""


def truth(kind: str, tokens: float, slots: int, context: int) -> float:
    """Milliseconds for which the model holds: a cell costs 1, 3 and 4 microseconds for 1, 4 and 8 slots."""
    a = {1: 1e-3, 4: 3e-3, 8: 4e-3}[slots]
    return 30 + 2 * tokens + {"plain": 1.0, "verify": 2.0}[kind] * a * context


def test_all_parts_are_recovered_where_every_slot_bucket_has_two_contexts() -> None:
    """Also between the measured numbers of tokens, and for a kind that was measured at one context only there."""
    places = [("plain", s, s, c) for s in (1, 4, 8) for c in (512, 2048)]
    places += [("verify", t, s, c) for s, t in ((1, 4), (1, 8), (8, 64)) for c in (512, 2048)] + [
        ("verify", 16, 4, 512)
    ]
    model = fit([Step(*place, truth(*place)) for place in places])
    for place in [*places, ("verify", 16, 4, 2048), ("verify", 36, 4, 4096), ("verify", 6, 1, 100)]:
        assert model.ms(*place) == pytest.approx(truth(*place))
        assert model.error(Step(*place, 2 * truth(*place))) == pytest.approx(0.5)


def test_slots_between_the_measured_ones_lie_between_them() -> None:
    """0.002 and 0.0015 ms a cell of one slot at 2 and 6 slots: 0.00175 at 4; constant beyond."""
    steps = [Step("plain", s, s, c, 10 + s * each * c) for s, each in ((2, 2e-3), (6, 1.5e-3)) for c in (100, 1000)]
    model = fit(steps)
    for slots, each in ((1, 2e-3), (4, 1.75e-3), (12, 1.5e-3)):
        assert model.cell_ms("plain", slots) == pytest.approx(slots * each)


def test_cells_are_free_where_no_two_steps_differ_in_them_alone() -> None:
    model = fit([Step("plain", 1, 1, 512, 10.0), Step("plain", 8, 8, 4096, 20.0)])
    assert model.cell_ms("plain", 8) == 0.0 and model.ms("plain", 8, 8, 9999) == 20.0


def test_the_tokens_part_never_falls_and_the_cells_part_is_never_negative() -> None:
    values = [(1, 1, 10.0), (2, 1, 8.0), (4, 1, 12.0), (4, 100, 11.0)]
    model = fit([Step("verify", tokens, 1, context, ms) for tokens, context, ms in values])
    assert model.cell_ms("verify", 1) == 0.0
    assert (np.diff(model.tokens["verify"][1]) >= 0).all()


def test_held_out_steps_of_a_real_machine_are_told_within_thirty_percent() -> None:
    """One price for a cell, whatever the slots and the program, missed one of these by 50 %."""
    steps = [
        Step(kind, tokens, slots, context, ms)
        for (slots, context), (plain, verify) in SMOLLM2.items()
        for kind, tokens, ms in [("plain", slots, plain), *(("verify", t, ms) for t, ms in verify.items())]
    ]
    errors = [fit([other for other in steps if other != step]).error(step) for step in steps]
    assert max(errors) < 0.3 and np.median(errors) < 0.14


def test_what_is_no_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit([])
    with pytest.raises(ValueError, match="ms: finite numbers > 0 expected, got 0.0"):
        fit([Step("plain", 1, 1, 1, 0.0)])
    with pytest.raises(ValueError, match="kind: one of plain expected"):
        fit([Step("plain", 1, 1, 1, 1.0)]).ms("draft", 1, 1, 1)
