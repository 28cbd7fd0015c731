"""What decides the number of drafts: old scores and step times only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dspark_jax.calibrate import Calibration, CalibrationTables
from dspark_jax.config import Sampling
from dspark_jax.engine import EngineConfig
from dspark_jax.engine.adaptive import Current, EarlyStop, Lagged
from dspark_jax.engine.estimates import FORGET, PRIOR, WEIGHT, Acceptances, Confidences, Score
from dspark_jax.engine.modes import choose_policy
from dspark_jax.engine.policy import OUTSIDE, Beside, Corrections, Costs, Policy, Threshold
from dspark_jax.engine.request import Checked
from dspark_jax.engine.slots import RAW, Tenant
from dspark_jax.schedule import StepTimeTable, admit_early_stop, admit_top_k, capacity
from tests.engine.cases import step_times


class Drafter:
    def __init__(self, has_confidence: bool = True) -> None:
        self.block_size, self.max_drafts, self.has_confidence = 3, 3, has_confidence


def tenant(number: int, **request: Any) -> Tenant:
    values: dict[str, Any] = {"prompt": (1,), "limit": 5, "sampling": Sampling(), "seed": None, "coupled": False}
    return Tenant(number, Checked(**{**values, **request}, stop_ids=()), number)


STEEP = StepTimeTable(tokens=[2, 9], milliseconds=[1.0, 1e6])  # no draft ever pays
FINE = StepTimeTable(tokens=range(2, 10), milliseconds=[1.0, *[1e6] * 7])  # the same, with every size
DRAFT_MS = 0.1


def costs_of(table: StepTimeTable, draft_ms: float = DRAFT_MS) -> Costs:
    return lambda drafting: (table, draft_ms)


def score(tenant: Tenant, *survival: float, offered: int = 0, accepted: int = 0) -> Score:
    return Score(tenant, np.array(survival), offered, accepted)


def test_capacity_uses_scores_that_are_two_cycles_old() -> None:
    """What cycles n - 1 and n saw does not exist yet for cycle n."""
    policy, t, table = Lagged(3), tenant(0), step_times()
    rows = {0: [0.9, 0.8, 0.7], 1: [0.3, 0.1, 0.0], 2: [0.95, 0.9, 0.9], 3: [0.0, 0.0, 0.0]}
    for cycle, row in rows.items():
        policy.observe(cycle, [score(t, *row)])
        if cycle >= 1:
            wanted = capacity(np.array([rows[cycle - 1]]), table, DRAFT_MS)
            assert policy.decide(cycle + 1, [t], costs_of(table)).drafts == wanted


def test_no_one_is_judged_by_what_prompts_have_left_of_a_step() -> None:
    """Ten cycles in which pieces of prompts leave no token to drafts: nobody leaves the draft batch, no probe is spent,
    and the first cycle with room drafts as if they had not been. Were they judged, all would have left."""
    full = step_times()
    none = StepTimeTable(tokens=full.tokens[full.tokens <= 2], milliseconds=full.milliseconds[full.tokens <= 2])
    for crowded in (True, False):
        policy, tenants = Lagged(3), [tenant(0), tenant(1)]
        for cycle in range(10):
            decision = policy.decide(cycle, tenants, costs_of(none), Beside(crowded))
            assert decision.drafts == 0 and (not crowded or not decision.probe)
        assert [t.left is None for t in tenants] == [crowded, crowded]
        after = policy.decide(10, tenants, costs_of(full))
        assert (after.drafts > 0) == crowded


def test_a_new_tenant_starts_from_the_average_of_all() -> None:
    """Never from what others or its slot saw in the last two cycles; older scores move the average."""
    policy, costs = Lagged(3), costs_of(step_times())
    prior = PRIOR ** np.arange(1, 4)
    new = tenant(1)
    assert policy.decide(0, [new], costs).drafts == capacity(prior[None], step_times(), DRAFT_MS)
    policy.observe(0, [score(tenant(0), 0.0, 0.0, 0.0)])
    assert policy.decide(1, [new], costs).drafts == capacity(prior[None], step_times(), DRAFT_MS)
    np.testing.assert_array_equal(policy._estimates.survival(new, 1), prior)
    policy.decide(2, [new], costs)
    np.testing.assert_allclose(policy._estimates.survival(new, 2), 0.9 * prior)


def test_without_a_new_score_the_last_one_decays_towards_the_average() -> None:
    """A tenth of the distance with every cycle that brings none; rows stay survivals."""
    estimates, t = Confidences(2), tenant(0)
    estimates.observe(5, [score(t, 0.5, 0.1)])
    estimates.advance(7)
    average = 0.9 * np.array([0.8, 0.64]) + 0.1 * np.array([0.5, 0.1])
    for later in range(4):
        want = average + 0.9**later * (np.array([0.5, 0.1]) - average)
        np.testing.assert_allclose(estimates.survival(t, 7 + later), want)
    assert estimates.fresh(t, 7) and not estimates.fresh(t, 8)


def test_the_average_forgets_with_time_and_the_less_the_fewer_rows_it_gets() -> None:
    """The prior counts as nine rows; of n rows a cycle 0.1 n / (n + 9) is forgotten, but never so much that fewer than
    nine are left. By hand: rows of 1 and 3 requests, one 64 cycles later, and steadily one and ninety a cycle."""
    estimates, average = Confidences(1), PRIOR
    for cycle, count, kept in [(0, 1, 9.0), (1, 3, 10 * 0.975), (65, 1, 9.0), (66, 1, 10 * 0.99)]:
        estimates._take_in(cycle, np.full((count, 1), 0.1 * count))
        rows = kept + count
        average += (0.1 * count - average) * count / rows
        assert estimates._average[0] == pytest.approx(average)
    for count, rate in ((1, 0.01), (90, 0.1 * 90 / 99)):
        estimates = Confidences(1)
        for cycle in range(1000):
            estimates._take_in(cycle, np.full((count, 1), 0.5))
        estimates._take_in(1000, np.ones((count, 1)))
        assert estimates._average[0] == pytest.approx(0.5 + 0.5 * rate, rel=1e-3)


def test_one_request_is_averaged_over_a_hundred_cycles_however_many_there_were_before() -> None:
    """256 requests leave 2,650 rows behind them. The one that stays moves the average by a hundredth a cycle, half of
    the way in 69, and not in the 330 in which that many rows are forgotten."""
    estimates = Confidences(1)
    for cycle in range(600):
        estimates._take_in(cycle, np.full((256, 1), 0.9))
    for cycle in range(600, 669):
        estimates._take_in(cycle, np.full((1, 1), 0.3))
    assert estimates._average[0] == pytest.approx(0.3 + 0.6 * 0.99**69)


def test_one_request_goes_on_drafting_what_pays_through_bad_luck() -> None:
    """Drafting pays if more than 0.58 of a first draft is accepted; scores are uniform between 0.3 and 1 and have
    nothing to do with each other, 0.65 on average. An average over the last ten of them is below 0.58 in an eighth of
    the cycles, and where nothing is drafted it stays there: half of the cycles would go without. At most a tenth of
    3,000 do (a fixed seed; at five others 0.02 to 0.2 did)."""
    table = StepTimeTable(tokens=[1, 2], milliseconds=[1.0, 1.5])
    rng, policy, who = np.random.default_rng(0), Lagged(1), tenant(0)
    skipped = 0
    for cycle in range(3000):
        drafts = policy.decide(cycle, [who], costs_of(table, 0.08)).drafts
        skipped += not drafts
        if drafts:
            policy.observe(cycle, [score(who, rng.uniform(0.3, 1.0), offered=1)])
    assert skipped < 300


def test_old_scores_regress_to_the_mean_as_far_as_they_have_proved_to() -> None:
    """Believed at first; one pair of scores two cycles apart, by hand, its distances from the average that was known
    with the earlier one. Scores one cycle apart, or with a stay elsewhere between them, are no pair."""
    rows = {0: np.array([0.5, 0.1]), 1: np.array([0.9, 0.9]), 2: np.array([0.7, 0.6])}
    estimates, t, moved = Confidences(2), tenant(0), tenant(1)
    average = np.array([PRIOR, PRIOR**2])
    for cycle, row in rows.items():
        assert estimates._slope.value == 1.0
        np.testing.assert_array_equal(estimates.expected(rows[0][None]), rows[0][None])
        other = dataclasses.replace(score(moved, *row), stay=moved.stays)
        estimates.observe(cycle, [score(t, *row)] + ([other] if cycle != 1 else []))
        if cycle == 0:
            average = (9 * average + 2 * row) / 11
            moved.leave()
        estimates.advance(cycle + 2)
    assert moved.score is not None and moved.earlier is None  # that of cycle 0 was of before it left
    first, second = rows[0] - average, rows[2] - average
    slope = (FORGET * WEIGHT + first @ second) / (FORGET * WEIGHT + first @ first)
    assert 0.5 < slope < 0.9 and estimates._slope.value == pytest.approx(slope)
    want = slope * rows[0] + (1 - slope) * estimates._average
    np.testing.assert_allclose(estimates.expected(rows[0][None]), want[None])


@pytest.mark.parametrize(
    ("requests", "lasting", "correlation", "slope"),
    [(1, 0.0, 0.8, 0.64), (1, 0.0, 0.0, 0.0), (2, 0.0, 0.0, 1 / np.pi), (200, 0.0, 0.0, 1.0), (8, 0.2, 0.0, 1.0)],
)
def test_the_slope_is_that_of_the_scores(requests: int, lasting: float, correlation: float, slope: float) -> None:
    """Scores of one request that forgets (0.8 a cycle, so 0.64 in two), and of one whose scores have nothing to do with
    those before. Of two such the higher one is followed by a higher one: the mean of the larger of two normal numbers
    is 1 / sqrt(pi). 200 vary as 200 did. Nor is there regression where requests differ and nothing else. Within
    0.08, the mean over the last cycles of 4,000."""
    rng = np.random.default_rng(0)
    tenants, state, slopes = [tenant(n) for n in range(requests)], rng.normal(size=requests), []
    own, estimates = lasting * rng.uniform(-1, 1, requests), Confidences(2)
    for cycle in range(4000):
        state = correlation * state + np.sqrt(1 - correlation**2) * rng.normal(size=requests)
        first = np.clip(0.5 + own + (0.0 if lasting else 0.1) * state, 0.0, 1.0)
        estimates.observe(cycle, [score(t, x, 0.5 * x) for t, x in zip(tenants, first, strict=True)])
        estimates.advance(cycle + 2)
        estimates._average = np.array([0.5, 0.25])
        estimates._averages = dict.fromkeys(estimates._averages, estimates._average)
        slopes.append(estimates._slope.value)
    assert np.mean(slopes[500:]) == pytest.approx(slope, abs=0.08)
    rows = np.sort(rng.random((500, 2)))[:, ::-1]
    expected = estimates.expected(rows)
    assert (expected[:, 1] <= expected[:, 0]).all() and (expected >= 0).all() and (expected <= 1).all()


def test_what_is_expected_knows_nothing_of_the_last_two_cycles() -> None:
    """Two runs that are alike up to cycle 9 and unlike from then on choose alike up to cycle 11, by scores that have
    regressed meanwhile; and unlike in cycle 12. So the slope is as old as the scores it is used on."""
    runs = []
    for later in (0.99, 0.05):
        rng, policy, tenants = np.random.default_rng(3), Lagged(3), [tenant(n) for n in range(8)]
        found = []
        for cycle in range(13):
            found.append((policy.decide(cycle, tenants, costs_of(step_times())).drafts, policy._estimates._slope.value))
            rows = np.cumprod(rng.uniform(0.3, 1.0, (8, 3)), axis=1)
            if cycle >= 10:
                rows = np.full((8, 3), later)
            policy.observe(cycle, [score(t, *row) for t, row in zip(tenants, rows, strict=True)])
        runs.append(found)
    assert runs[0][:12] == runs[1][:12] and runs[0][12] != runs[1][12]
    assert 0.0 < runs[0][11][1] < 0.99


def test_acceptance_by_position_is_learned_where_there_is_no_confidence_head() -> None:
    """Two of two accepted, then the first of three refused: by hand, with four drafts of all beside a request's own."""
    estimates, t, other = Acceptances(3), tenant(0), tenant(1)
    estimates.observe(0, [score(t, 1, 1, 1, offered=2, accepted=2)])
    estimates.observe(1, [score(t, 1, 1, 1, offered=3, accepted=0)])
    estimates.advance(3)
    first = (0.995 * (0.995 * 3.2 + 1.0)) / (0.995 * (0.995 * 4.0 + 1.0) + 1.0)  # tried twice
    second = (0.995 * 3.2 + 1.0) / (0.995 * 4.0 + 1.0)  # tried once
    np.testing.assert_allclose(estimates.conditional(other), [first, second, 0.8])
    own = [(0.95 + 4 * first) / (1.95 + 4), (0.95 + 4 * second) / (0.95 + 4), 0.8]
    np.testing.assert_allclose(estimates.conditional(t), own)
    np.testing.assert_allclose(estimates.survival(t, 3), np.cumprod(own))


def test_skipped_drafts_are_probed_again() -> None:
    """After 8, 16, 32, then every 64 cycles; without a probe there would never be a score again. One draft of each
    request is verified, whatever its score, and all of them where only acceptance teaches. What the step has room for
    beside them costs nothing more, and is verified too."""
    for has_confidence, look in ((True, 1), (False, 3)):
        for table, drafts in ((FINE, 2 * look), (STEEP, 6)):
            policy = Lagged(3, has_confidence=has_confidence)
            found = [policy.decide(n, [tenant(0), tenant(1)], costs_of(table)) for n in range(300)]
            assert [n for n, d in enumerate(found) if d.drafts] == [7, 23, 55, 119, 183, 247]
            probe = found[7]
            assert probe.probe and probe.drafts == drafts and probe.least.tolist() == [look, look]
            assert all(d.least.tolist() == [OUTSIDE, OUTSIDE] for d in found if not d.drafts)


def test_a_probe_waits_for_a_step_that_has_room() -> None:
    """A budget of tokens that two requests fill: nothing is drafted or said to be a probe, and the wait for one begins
    when there is room."""
    policy, tenants = Lagged(3), [tenant(0), tenant(1)]
    full = StepTimeTable(tokens=[2], milliseconds=[1.0])
    found = [policy.decide(n, tenants, costs_of(full)) for n in range(20)]
    found += [policy.decide(n, tenants, costs_of(STEEP)) for n in range(20, 30)]
    assert [n for n, decision in enumerate(found) if decision.probe or decision.drafts] == [27]


def run_cycles(policy: Lagged, tenants: list[Tenant], rows: list[list[float]], count: int, first: int = 0) -> list[Any]:
    """Cycles in which every request inside the draft batch gets its row as score."""
    found = []
    for n in range(first, first + count):
        found.append(policy.decide(n, tenants, costs_of(step_times())))
        inside = [i for i, least in enumerate(found[-1].least) if least != OUTSIDE]
        policy.observe(n, [score(tenants[i], *rows[i]) for i in inside])
    return found


def test_a_hopeless_request_leaves_the_draft_batch_and_is_probed() -> None:
    """Eight cycles of a first draft that is not worth its place; then looked at after 8, 16, 32, ... drafting cycles,
    with one draft verified; once its scores are good it is back two cycles later."""
    policy, tenants = Lagged(3), [tenant(0), tenant(1)]
    good, bad = [0.9, 0.8, 0.7], [0.01, 0.0, 0.0]
    found = run_cycles(policy, tenants, [good, bad], 60)
    outside = [n for n, d in enumerate(found) if d.least[1] == OUTSIDE]
    assert outside[0] == 9  # scores are known from cycle 2 on: 2 .. 9 are eight of them
    probed = [n for n in range(9, 60) if d_least(found, n) == 1]
    assert probed == [16, 32]
    both = [d.drafts for d in found[10:16]]
    assert all(drafts == 3 for drafts in both) and found[16].drafts == 4
    found = run_cycles(policy, tenants, [good, good], 60, first=60)
    back = next(n for n in range(60) if d_least(found, n) == 1)
    assert [d.least[1] for d in found[back + 1 : back + 6]] == [OUTSIDE, 0, 0, 0, 0]
    assert all(d.least[0] == 0 for d in found)


def d_least(found: list[Any], n: int) -> int:
    return int(found[n].least[1])


def test_after_a_probe_that_pays_everyone_drafts_again() -> None:
    """Where nobody drafts all have left sooner or later; the search counts whoever was just looked at."""
    policy, tenants = Lagged(3), [tenant(0), tenant(1)]
    for n in range(30):
        decision = policy.decide(n, tenants, costs_of(STEEP))
        if decision.drafts:
            policy.observe(n, [score(t, 0.9, 0.8, 0.7) for t in tenants])
    assert all(t.left is not None for t in tenants)
    policy.observe(30, [score(t, 0.9, 0.8, 0.7) for t in tenants])
    decision = policy.decide(32, tenants, costs_of(step_times()))
    assert decision.drafts == capacity(np.array([[0.9, 0.8, 0.7]] * 2), step_times(), DRAFT_MS) > 0
    assert decision.least.tolist() == [0, 0] and all(t.left is None for t in tenants)


def test_current_looks_only_where_nobody_can_be_biased() -> None:
    """Coupled and greedy requests: the search on the scores at hand. One sampled `rejection` request among them: as
    lagged, and counted. A probe's drafts are verified in both."""
    table = step_times()
    greedy, coupled, sampled = tenant(0, sampling=Sampling(0.0)), tenant(1, coupled=True), tenant(2)
    now = np.array([[0.9, 0.8, 0.1], [0.3, 0.0, 0.0]], np.float32)
    for tenants, fallback in (([greedy, coupled], False), ([greedy, sampled], True)):
        policy = Current(3)
        decision = policy.decide(0, tenants, costs_of(table))
        assert decision.fallback == fallback and decision.drafts > 0
        got = policy.lengths(tenants, decision, np.array([1, 1], np.int32), now)
        want = admit_top_k(now, capacity(now, table, DRAFT_MS, draft_paid=True))
        assert got.tolist() == ([1, 1] if fallback else want.tolist())
    probe = dataclasses.replace(decision, fallback=False, least=np.array([0, 1], np.int32))
    assert policy.lengths(tenants, probe, now[:, 0], np.array([[0.9, 0.8, 0.1], [0.01, 0.0, 0.0]])).tolist()[1] == 1


def test_early_stop_decides_beforehand_whether_to_draft() -> None:
    """From old scores; then Algorithm 1 with the draft on both sides of every comparison."""
    policy, tenants = EarlyStop(3), [tenant(0)]
    assert policy.decide(0, [tenant(1), tenant(2)], costs_of(STEEP)).drafts == 0
    decision = policy.decide(0, tenants, costs_of(step_times()))
    now = np.array([[0.9, 0.8, 0.1]])
    got = policy.lengths(tenants, decision, np.array([3], np.int32), now)
    assert got.tolist() == admit_early_stop(now, step_times(), DRAFT_MS).tolist()


@pytest.mark.parametrize("policy", [Policy, Threshold])
def test_a_step_s_room_is_shared_by_count(policy: type[Policy]) -> None:
    """What does not divide goes to the first requests; nobody gets more than a block; scores do not matter."""
    tenants = [tenant(n) for n in range(3)]
    shares = {None: [3, 3, 3], 99: [3, 3, 3], 12: [3, 3, 3], 11: [3, 3, 2], 8: [2, 2, 1], 4: [1, 0, 0], 3: [0, 0, 0]}
    for room, wanted in {**shares, 1: [0, 0, 0]}.items():
        decision = policy(3).decide(0, tenants, None, Beside(room=room))
        assert decision.most is not None and decision.most.tolist() == wanted and decision.drafts == sum(wanted)
        assert decision.least.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("config", "drafter", "mode", "note"),
    [
        ({}, None, "none", "no drafter"),
        ({"mode": "none"}, Drafter(), "none", None),
        ({"mode": "fixed"}, Drafter(), "fixed", None),
        ({}, Drafter(), "lagged", None),
        ({"step_time": STEEP}, Drafter(False), "lagged", "no confidence head"),
        ({"step_time": STEEP}, Drafter(), "lagged", None),
        ({"mode": "early_stop", "step_time": STEEP}, Drafter(), "early_stop", "do not overlap"),
        ({"mode": "early_stop", "step_time": STEEP, "overlap": False}, Drafter(), "early_stop", None),
        ({"mode": "early_stop"}, Drafter(), "early_stop", "do not overlap"),
        ({"mode": "current", "step_time": STEEP}, Drafter(), "current", "do not overlap"),
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
    tables = CalibrationTables(
        tuple(
            Calibration(np.full(3, value), verification=rule, sampling_temperature=at)
            for value, rule, at in ((2.0, "rejection", 1.0), (3.0, "rejection", 0.0))
        )
    )
    corrections = Corrections(tables, 2)
    temperature, shift = corrections.of(tenant(0).request)
    assert (list(temperature), shift) == ([2.0, 2.0], 0.0)
    np.testing.assert_array_equal(corrections.of(tenant(0, sampling=Sampling(0.0)).request).temperature, [3.0, 3.0])
    assert corrections.of(tenant(0, coupled=True).request) == RAW
    assert Corrections(None, 2).of(tenant(0).request) == RAW
    shifted = CalibrationTables((Calibration(np.full(3, 4.0), shift=-0.5), *tables.tables))
    temperature, shift = Corrections(shifted, 2).of(tenant(0).request)
    assert (list(temperature), shift) == ([4.0, 4.0], -0.5)
    with pytest.raises(ValueError, match="calibration: 3 temperatures for blocks of 4 drafts"):
        Corrections(tables, 4)
