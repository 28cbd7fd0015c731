"""Blocks of several widths: which is chosen, what a narrow one shows, and that texts do not depend on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.engine import Engine, EngineConfig, steps
from dspark_jax.engine.adaptive import Lagged
from dspark_jax.engine.buckets import Buckets, Key, plan_buckets
from dspark_jax.engine.estimates import PROBE_FIRST, Confidences, Probe, Score
from dspark_jax.engine.modes import choose_policy
from dspark_jax.engine.policy import OUTSIDE, Costs
from dspark_jax.engine.profile import corners, profile
from dspark_jax.engine.refine import refine
from dspark_jax.engine.step_times import StepTimes
from dspark_jax.schedule import StepTimeTable, admit_top_k
from dspark_jax.schedule.choice import choose
from dspark_jax.testing import tiny_drafter, tiny_target
from tests.engine.cases import BLOCK, Models, engine_config, expected, random_requests, run_all
from tests.engine.test_draft_batch import CONTEXT, SLOTS, draft, opened
from tests.engine.test_policy import Drafter, tenant

TIMES = StepTimeTable(
    tokens=range(1, 33), milliseconds=[1 + 0.1 * t for t in range(1, 33)], draft_ms=0.5, draft_ms_by_width=((3, 0.2),)
)


def costs_of(table: StepTimeTable) -> Costs:
    return lambda drafting, width=None: (table, table.draft_ms_of(width))


def decide(policy: Lagged, cycle: int, who: Any, row: Any, table: StepTimeTable = TIMES) -> Any:
    policy.observe(cycle - 2, [Score(who, np.asarray(row, float), 0, 0)])
    return policy.decide(cycle, [who], costs_of(table))


@pytest.mark.parametrize(("acceptance", "width"), [(0.5, 3), (0.95, None)])
def test_the_width_is_that_of_the_best_schedule(acceptance: float, width: int | None) -> None:
    """Seven drafts at 0.95 are worth the dearer draft, three at 0.5 are not; the capacity is that of the width."""
    row = acceptance ** np.arange(1, 8)
    found = decide(Lagged(7, narrow=(3,)), 2, tenant(0), row)
    wanted = choose(row[None, : width or 7], TIMES, 0.5 if width is None else 0.2)
    other = choose(row[None, : 7 if width else 3], TIMES, 0.5 if width else 0.2)
    assert (found.width, found.drafts) == (width, wanted.drafts) and found.drafts > 0
    assert found.draft_ms == (0.5 if width is None else 0.2) and wanted.worth > other.worth


def test_among_equal_widths_the_narrower_is_drafted() -> None:
    """A table that knows one draft time: three drafts pay of either block."""
    table = dataclasses.replace(TIMES, draft_ms_by_width=())
    row = [0.9, 0.8, 0.7, 0.01, 0.01, 0.0, 0.0]
    assert decide(Lagged(7, narrow=(1, 3)), 2, tenant(0), row, table).width == 3


def test_a_width_without_a_program_is_not_chosen() -> None:
    def costs(drafting: Any, width: int | None = None) -> tuple[StepTimeTable, float]:
        return TIMES, 0.5 if width is None else np.inf

    policy, who = Lagged(7, narrow=(3,)), tenant(0)
    policy.observe(0, [Score(who, 0.5 ** np.arange(1, 8), 0, 0)])
    found = policy.decide(2, [who], costs)
    assert found.width is None and found.draft_ms == 0.5


@pytest.mark.parametrize(("floor", "width"), [(0.0, None), (550.0, 3)])
def test_a_speed_floor_is_kept_by_the_width_too(floor: float, width: int | None) -> None:
    """Seven drafts of the first request are best (7.7 tokens in 2.4 ms), and leave the second one, of which no draft is
    worth anything, 417 tokens a second. Three in a narrow block leave it 588, and a whole one that leaves it as much
    has room for one."""
    policy = Lagged(7, EngineConfig(mode="lagged", speed_floor=floor), narrow=(3,))
    fast, slow = tenant(0), tenant(1)
    policy.observe(0, [Score(fast, 0.95 ** np.arange(1, 8), 0, 0), Score(slow, np.full(7, 0.01), 0, 0)])
    found = policy.decide(2, [fast, slow], costs_of(TIMES))
    assert (found.width, found.drafts) == (width, width or 7)


def test_whole_blocks_are_looked_at_now_and_then() -> None:
    """What stands behind a narrow block is not seen: after 8 cycles, then after 16, the block is whole."""
    policy, who = Lagged(7, narrow=(3,)), tenant(0)
    widths = [decide(policy, n, who, 0.5 ** np.arange(1, 8)).width for n in range(2, 2 + 3 * PROBE_FIRST)]
    assert [n for n, width in enumerate(widths) if width is None] == [PROBE_FIRST - 1, 3 * PROBE_FIRST - 1]


def test_without_a_confidence_head_one_request_after_the_other_shows_what_is_behind() -> None:
    """Three requests of which nothing survives behind three drafts, and later everything: whole blocks pay then, which
    only drafts that are verified can tell. The scores of narrow blocks have shown their three places alone."""
    policy, who = Lagged(7, has_confidence=False, narrow=(3,)), [tenant(i) for i in range(3)]
    looked, widths = [], []
    for cycle in range(1500):
        decision = policy.decide(cycle, who, costs_of(TIMES))
        width = decision.width or 7
        widths.append(width)
        looked += [i for i in range(3) if decision.least[i] > 0]
        survival = 0.5 * policy._estimates.survivals(who, cycle)[:, :width]
        survival[np.arange(width) < decision.least[:, None]] = 1.0  # before all others
        offered, true = admit_top_k(survival, decision.drafts), 3 if cycle < 300 else 7
        found = [Score(t, np.zeros(7), int(n), min(int(n), true), 0, width) for t, n in zip(who, offered, strict=True)]
        policy.observe(cycle, found)
    assert widths[100:300].count(3) > 190 and set(widths[-100:]) == {7}
    assert looked[:4] == [0, 1, 2, 0]


def test_a_probe_of_an_engine_that_skips_is_a_whole_block() -> None:
    steep = StepTimeTable(tokens=[1, 2, 9], milliseconds=[1.0, 90.0, 90.0], draft_ms=1.0, draft_ms_by_width=((3, 0.1),))
    policy, who = Lagged(7, narrow=(3,)), tenant(0)
    found = [policy.decide(n, [who], costs_of(steep)) for n in range(PROBE_FIRST)]
    assert [d.probe for d in found] == [False] * 7 + [True]
    assert found[-1].width is None and found[-1].draft_ms == 1.0


def test_a_narrow_score_goes_on_as_the_average_does() -> None:
    """The average knows two places more; its conditional acceptances there are those of before."""
    estimates, who = Confidences(4), tenant(0)
    estimates.observe(0, [Score(who, np.array([0.9, 0.6, 0.3, 0.1]), 0, 0)])
    estimates.advance(2)
    before = estimates._average.copy()
    estimates.observe(2, [Score(who, np.array([0.5, 0.4, 0.0, 0.0], np.float32), 0, 0, width=2)])
    estimates.advance(4)
    after, own = estimates._average, estimates.survival(who, 4)
    assert own[:2] == pytest.approx([0.5, 0.4])
    for row in (own, after):
        assert row[2:] / row[1:-1] == pytest.approx(before[2:] / before[1:-1])
    assert after[:2] == pytest.approx((0.99**2 * 10 * before[:2] + np.array([0.5, 0.4])) / (0.99**2 * 10 + 1))
    assert (np.diff(own) <= 0).all() and (np.diff(after) <= 0).all()


def test_the_slope_learns_from_the_places_that_both_scores_know() -> None:
    """Whatever stands behind two narrow blocks, the slope is the same; it is one of two places."""

    def slope(tail: float, width: int, drafts: int) -> float:
        estimates, who = Confidences(drafts), tenant(0)
        for cycle in range(0, 12, 2):
            row = np.array([0.9, 0.5] if cycle % 4 else [0.4, 0.3])
            row = np.concatenate([row, np.full(drafts - 2, tail)])
            estimates.observe(cycle, [Score(who, row, 0, 0, width=width)])
            estimates.advance(cycle + 2)
        return estimates._slope.value

    assert slope(0.0, 2, 4) == slope(0.1, 2, 4) == pytest.approx(slope(0.0, 2, 2))
    assert slope(0.0, 2, 4) != slope(0.0, 4, 4)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [1, 3]], ids=["all", "some"])
def test_a_narrow_draft_is_the_whole_one_cut_off(slots: list[int]) -> None:
    """A drafter of one trained width, whose narrow blocks are the beginnings of whole ones: the same drafts and scores;
    behind them nothing survives, nothing is admitted, and the logits there are those of before."""
    target = tiny_target(num_layers=1)
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=(0,))
    state = jax.jit(opened)(target, drafter)
    base = jnp.full((3, SLOTS, 32), 7.0, jnp.float32)
    whole = draft(drafter, state, slots, [0] * len(slots), base, 99)
    numbers = jnp.int32(99), jnp.float32(0.0), jnp.ones((len(slots), 3)), jnp.zeros(len(slots))
    rows = (jnp.asarray(a, jnp.int32) for a in ([0] * len(slots), [3] * len(slots), slots))
    program = partial(
        steps.draft, rows=len(slots), drafts=2, context=CONTEXT, max_positions=99, rule="top_k", static=steps.Static()
    )
    got = jax.jit(program)(drafter, state.replace(target=None), base, *numbers, *rows)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, whole)
    for name in ("tokens", "draft_index", "log_q", "confidence_logits"):
        wide, narrow = (np.asarray(getattr(d.proposal, name)) for d in (whole, got))
        np.testing.assert_array_equal(narrow[:, :2], wide[:, :2])
    np.testing.assert_array_equal(got.proposal.base[:2], whole.proposal.base[:2])
    np.testing.assert_array_equal(got.proposal.base[2], base[2])
    np.testing.assert_array_equal(got.survival[:, :2], whole.survival[:, :2])
    assert not np.asarray(got.survival)[:, 2].any()
    assert np.asarray(whole.admitted)[slots].max() == 3 and np.asarray(got.admitted)[slots].tolist() == [2] * len(slots)


class Block(Drafter):
    """A drafter of blocks of seven that was trained at some widths, or (a chain) makes any."""

    def __init__(self, *widths: int, chain: bool = False, anchor: bool = True) -> None:
        super().__init__()
        self.block_size = self.max_drafts = 7
        whole = 7 if anchor else 8

        class Config:
            sample_from_anchor, block_widths = anchor, widths

            def block_width(self, drafts: int) -> int:
                wanted = drafts + (not anchor)
                return wanted if wanted in widths else whole

        Config.chain = chain  # type: ignore[attr-defined]
        self.config = Config()


@pytest.mark.parametrize(
    ("drafter", "narrow"),
    [
        (Block(), ()),
        (Block(3), (3,)),
        (Block(2, 4, 6, 7), (4,)),
        (Block(3, 5, anchor=False), (4,)),
        (Block(chain=True), (3,)),
        (Drafter(), ()),
    ],
    ids=["one width", "three", "several", "fill-in", "chain", "three drafts"],
)
def test_about_half_a_block_stands_beside_the_whole_one(drafter: Any, narrow: tuple[int, ...]) -> None:
    """Where the drafter makes it with less work, and the whole block has at least five drafts."""
    assert choose_policy(EngineConfig(mode="lagged"), drafter)[1].narrow == narrow


def test_widths_are_checked() -> None:
    for wrong in ((), (0,), (3, 1), (1.5,), 3):
        with pytest.raises(ValueError, match="draft_widths"):
            EngineConfig(draft_widths=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"draft_widths must lie in 1\.\.3 .*4"):
        choose_policy(EngineConfig(mode="lagged", draft_widths=(2, 4)), Drafter())
    assert choose_policy(EngineConfig(mode="lagged", draft_widths=[1, 3]), Drafter())[1].narrow == (1,)  # type: ignore[arg-type]
    assert choose_policy(EngineConfig(mode="lagged", draft_widths=(3,)), Drafter())[1].narrow == ()
    _, policy, notes = choose_policy(EngineConfig(mode="fixed", draft_widths=(2,)), Drafter())
    assert policy.narrow == () and any("draft_widths" in note for note in notes)


def planned(budget: int, **changes: Any) -> Buckets:
    config = EngineConfig(max_num_seqs=4, max_model_len=128, slot_buckets=(1, 2, 4), **changes)
    options: dict[str, Any] = {"variable": True, "skips": True, "spend": False, "narrow": (3,)}
    return plan_buckets(config, window=128, drafts=7, budget=budget, **options)


def test_narrow_blocks_take_at_most_half_of_what_is_left_of_the_budget() -> None:
    """The smallest slot buckets first. Widths that the configuration names are made in any case."""
    base = len(planned(1).keys(127))
    for left, slots in ((0, []), (1, []), (2, [1]), (5, [1, 2]), (6, [1, 2, 4])):
        found = planned(base + left)
        assert sorted(found.narrow) == slots and len(found.keys(127)) == base + len(slots)
        assert [found.draft_width(s, 3) for s in (1, 4)] == [3 if s in slots else None for s in (1, 4)]
    assert sorted(planned(1, draft_widths=(3,)).narrow) == [1, 2, 4]


def test_draft_times_by_width_are_measured_and_kept(tmp_path: Path) -> None:
    buckets = planned(99)

    def run(key: Key) -> float:
        return 1e-3 * (0.5 * (key.tokens or 7) if key.kind == "draft" else 10.0 + key.tokens)

    about = {"machine": "m", "device": "d", "dtype": "float32", "commit": "c", "model_hash": "h"}
    table = profile(run, buckets, 127, about, budget_s=1e3, clock=lambda: 0.0).table
    table.save(tmp_path / "table.json")
    loaded = StepTimeTable.load(tmp_path / "table.json")
    assert loaded == table and len(loaded.rows) > 1
    times = StepTimes(loaded, measured=True)
    for slots in buckets.slots:
        assert times.draft_ms(slots, 128, 3) == pytest.approx(1.5)
        assert times.draft_ms(slots, 128) == times.draft_ms(slots, 128, 5) == pytest.approx(3.5)


def test_a_table_without_widths_counts_for_every_width(tmp_path: Path) -> None:
    """Its file has no such field, as before there were any."""
    table = StepTimeTable(tokens=[1, 8], milliseconds=[1.0, 2.0], draft_ms=0.7)
    table.save(tmp_path / "old.json")
    assert "width" not in (tmp_path / "old.json").read_text()
    assert StepTimes(StepTimeTable.load(tmp_path / "old.json"), measured=False).draft_ms(1, 64, 3) == 0.7
    for wrong in ([3], [[3, -1.0]], [[0, 1.0]], [[3, 1.0], [2, 1.0]], "no", [[3, float("nan")]]):
        with pytest.raises(ValueError, match="draft_ms_by_width"):
            StepTimeTable(tokens=[1], milliseconds=[1.0], draft_ms_by_width=wrong)  # type: ignore[arg-type]


def test_of_several_narrow_widths_the_narrowest_is_a_corner() -> None:
    """It and whole blocks (0) are measured whatever the time; what lies between is told by the model."""
    buckets = dataclasses.replace(planned(99), narrow={1: (1, 2, 4)})
    found = {key.tokens for key in corners(buckets.keys(127)) if (key.kind, key.slots) == ("draft", 1)}
    assert found == {0, 1}


def test_a_measured_table_without_widths_leaves_narrow_blocks_out(chain: Models, tmp_path: Path) -> None:
    """It spent the whole budget of programs on verify sizes, so that narrow ones would be beyond it, and nobody has
    measured them. Widths that the configuration names are made all the same."""

    def run(key: Key) -> float:
        return 1e-3 * (0.1 * key.slots * (key.tokens or 5) if key.kind == "draft" else 10 + 0.2 * key.tokens)

    def made(**changes: Any) -> Engine:
        return Engine(*chain, engine_config(mode="lagged", num_speculative_tokens=5, max_programs=13, **changes))

    def saved(buckets: Buckets, name: str) -> Path:
        found = profile(run, buckets, engine.window - 1, engine._origin, budget_s=1e3, clock=lambda: 0.0)
        finer = refine(buckets, found.step_ms, found.draft_ms, 13, engine.window)
        assert len(finer.keys(engine.window - 1)) == 13
        table = profile(run, finer, engine.window - 1, engine._origin, budget_s=1e3, clock=lambda: 0.0).table
        table.save(tmp_path / name)
        return tmp_path / name

    engine = made()
    assert engine.buckets.narrow
    old, new = saved(dataclasses.replace(engine.buckets, narrow={}), "old"), saved(engine.buckets, "new")
    for path, narrow in ((old, {}), (new, engine.buckets.narrow)):
        found = made(step_time=path)
        assert found.buckets.narrow == narrow and len(found.buckets.keys(found.window - 1)) == 13
        assert any("lacks times of narrower blocks" in note for note in found.notes) == (path == old)
    assert set(made(step_time=old, draft_widths=(2,)).buckets.narrow) == set(engine.buckets.slots)


BY_WIDTH = StepTimeTable(
    tokens=range(1, 33), milliseconds=[1 + 0.1 * t for t in range(1, 33)], draft_ms=0.6, draft_ms_by_width=((1, 0.1),)
)


@pytest.fixture(scope="module")
def engine(models: Models) -> Engine:
    with jax.enable_x64(True):
        config = engine_config(mode="lagged", step_time=BY_WIDTH, token_buckets=(8, 12), draft_widths=(1,))
        made = Engine(*models, config)
        made.warmup()
        return made


@pytest.fixture
def anew(engine: Engine) -> Callable[..., Engine]:
    def begin(overlap: bool = True) -> Engine:
        engine._policy = Lagged(BLOCK, narrow=(1,))
        engine.reset()
        engine.overlap = overlap
        return engine

    return begin


def test_coupled_and_greedy_texts_do_not_depend_on_the_width(anew: Callable[..., Engine], models: Models) -> None:
    """Cycles of both widths; ``drafted`` counts what was drafted, and nothing is compiled under way."""
    engine, requests = anew(), random_requests(9, seed=1, verification="coupled")
    before, reports = engine.counters(), []
    engine.watch(reports.append)
    got = run_all(engine, requests)
    engine._reports.watchers.clear()
    assert [g[0] for g in got] == [e[0] for e in expected(models, requests)]
    after = engine.counters()
    widths = {int(n) for report in reports for n in report.drafted}
    assert {1, BLOCK} <= widths <= {0, 1, BLOCK}
    for report in reports:
        assert (report.offered <= report.drafted).all()
        if report.survival is not None:
            assert not report.survival[report.drafted == 1, 1:].any()
    seen = sum(int(report.drafted.sum()) for report in reports)
    assert 0 < seen <= after["drafted"] - before["drafted"]  # requests that had ended are drafted for, and not reported
    assert after["late_compiles"] == 0
    assert any(key.kind == "draft" and key.tokens == 1 for key in engine._programs._table)


def test_the_serial_twin_chooses_the_same_widths(anew: Callable[..., Engine]) -> None:
    requests, found = random_requests(9, seed=2), []
    for overlap in (True, False):
        decisions: list[tuple[int, int | None]] = []
        engine = anew(overlap)
        choose_plan = engine._choose

        def choose_and_note(plan_of: Any = choose_plan, noted: Any = decisions) -> Any:
            plan = plan_of()
            if plan is not None:
                noted.append((plan.decision.drafts, plan.decision.width))
            return plan

        engine._choose = choose_and_note  # type: ignore[method-assign]
        got = run_all(engine, requests)
        del engine._choose
        found.append((got, [d for d in decisions if d[0]]))
    assert found[0][0] == found[1][0]
    assert {width for _, width in found[1][1]} == {None, 1}


def test_who_gets_no_draft_gets_none_of_any_width() -> None:
    policy, inside, outside = Lagged(7, narrow=(3,)), tenant(0), tenant(1)
    outside.left = Probe()
    policy.observe(0, [Score(inside, 0.5 ** np.arange(1, 8), 0, 0)])
    found = policy.decide(2, [inside, outside], costs_of(TIMES))
    assert found.width == 3 and found.least.tolist() == [0, OUTSIDE] and 0 < found.drafts <= 3
