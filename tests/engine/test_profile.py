"""Step times measured at start-up: what is run, what is told, what is kept and what is refused.

The clock is a fake one that only programs move, so nothing here depends on the machine's speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax.engine import Engine
from dspark_jax.engine.buckets import Buckets, Key
from dspark_jax.engine.origin import model_hash, origin
from dspark_jax.engine.profile import KINDS, corners, in_turn, profile
from dspark_jax.engine.step_times import StepTimes, Store, given
from dspark_jax.schedule import StepTimeTable, roofline
from tests.engine.cases import Models, engine_config, random_requests, run_all

BUCKETS = Buckets(
    slots=(1, 4, 8), contexts=(64, 128), single=(), prefill=(16,), drafts=3, skips=True,
    tokens={1: (2, 4), 4: (8, 16), 8: (16, 32)},
)  # fmt: skip
KEYS = [key for key in BUCKETS.keys(100) if key.kind in KINDS]
HERE = dict(machine="m", device="d", dtype="float32", commit="c", model_hash="h" * 16)


def milliseconds(key: Key) -> float:
    """A machine for which the additive model holds."""
    tokens = key.slots * BUCKETS.drafts if key.kind == "draft" else key.tokens
    return {"plain": 5.0, "verify": 7.0, "draft": 1.0}[key.kind] + 0.5 * tokens + 0.01 * key.slots * key.context


class Machine:
    """Programs take as long as ``milliseconds`` says; the first call of each is slow."""

    def __init__(self, scale: float = 1.0) -> None:
        self.now, self.scale = 0.0, scale
        self.calls: list[Key] = []

    def run(self, key: Key) -> float:
        seconds = self.scale * milliseconds(key) / 1e3 + (0.0 if key in self.calls else 1.0)
        self.calls.append(key)
        self.now += seconds
        return seconds

    def profile(self, **options: Any) -> Any:
        return profile(self.run, BUCKETS, 100, HERE, clock=lambda: self.now, **options)


def row(table: StepTimeTable, slots: int, context: int) -> StepTimeTable:
    found = table.at(context, slots)
    assert (found.slots, found.context_tokens) == (slots, context)
    return found


def test_every_program_is_measured_where_there_is_time() -> None:
    """First calls are not counted; each row holds the plain step, then the verify sizes; the draft apart."""
    machine = Machine()
    found = machine.profile(budget_s=1e3, repeats=4)
    assert found.measured == found.programs == len(KEYS) and found.noise == 0.0
    twice = [key for key, counts in in_turn(KEYS) if not counts]  # the first of each slot bucket, in each round
    assert {machine.calls.count(key) for key in KEYS if key not in twice} == {5}
    assert {machine.calls.count(key) for key in twice} == {8} and {key.slots for key in twice} == set(BUCKETS.slots)
    for slots in BUCKETS.slots:
        for context in BUCKETS.contexts:
            got = row(found.table, slots, context)
            assert got.tokens.tolist() == [slots, *BUCKETS.tokens[slots]]
            want = [milliseconds(Key("plain", slots, slots, context))]
            want += [milliseconds(Key("verify", slots, t, context)) for t in BUCKETS.tokens[slots]]
            assert got.milliseconds == pytest.approx(want)
            assert got.draft_ms == pytest.approx(milliseconds(Key("draft", slots, 0, context)))
    assert found.held_out == len(KEYS) and found.worst_error < 1e-9  # two contexts tell every number of tokens
    assert "WARNING" not in " ".join(found.lines())


def test_a_run_behind_another_slot_bucket_is_not_counted() -> None:
    """Where the slots change a program takes twice as long: the table does not show it."""
    machine = Machine()
    plain, before = machine.run, [0]

    def run(key: Key) -> float:
        changed = before[0] != key.slots
        before[0] = key.slots
        return plain(key) * (2.0 if changed else 1.0)

    machine.run = run  # type: ignore[method-assign]
    found = machine.profile(budget_s=1e3)
    for slots in BUCKETS.slots:
        got = row(found.table, slots, BUCKETS.contexts[0])
        assert got.milliseconds[0] == pytest.approx(milliseconds(Key("plain", slots, slots, BUCKETS.contexts[0])))
        assert got.draft_ms == pytest.approx(milliseconds(Key("draft", slots, 0, BUCKETS.contexts[0])))
    assert found.noise == 0.0


def test_corners_come_first_and_the_model_fills_in_the_rest() -> None:
    """No time at all: the corners are measured once each, and here the model tells the others exactly."""
    machine = Machine()
    found = machine.profile(budget_s=0.0)
    first = corners(KEYS)
    assert set(machine.calls) == set(first) and found.measured == len(first) < len(KEYS)
    assert {(k.slots, k.context) for k in first} == {(s, c) for s in (1, 8) for c in (64, 128)}
    # Four slots: 0.5 a token between 1 and 8 (plain), between 4 and 16 (verify), between 3 and 24 (draft).
    got = row(found.table, 4, 128)
    assert got.milliseconds == pytest.approx(
        [milliseconds(Key("plain", 4, 4, 128)), *(milliseconds(Key("verify", 4, t, 128)) for t in (8, 16))]
    )
    assert got.draft_ms == pytest.approx(milliseconds(Key("draft", 4, 0, 128)))


def test_the_budget_ends_the_rounds() -> None:
    machine = Machine(scale=100.0)  # a round of all corners takes 25 s
    machine.profile(budget_s=60.0, repeats=100)
    assert 60.0 < machine.now < 120.0


def test_a_model_that_fails_is_told() -> None:
    """Four slots at the long context cost three times what the others promise."""
    machine = Machine()
    run = machine.run
    machine.run = lambda key: run(key) * (3.0 if (key.slots, key.context) == (4, 128) else 1.0)  # type: ignore[method-assign]
    found = machine.profile(budget_s=1e3)
    assert found.worst_error >= 2 / 3
    assert f"at most {100 * found.worst_error:.0f} %" in found.lines()[0]


def test_flat_and_noisy_tables_warn() -> None:
    flat = profile(lambda key: 0.01, BUCKETS, 100, HERE, clock=lambda: 0.0)
    assert any("WARNING step times are flat" in line for line in flat.lines())
    calls: Counter[Key] = Counter()

    def restless(key: Key) -> float:
        """Rounds of 20, 50, 10, 20, 50 ms behind the first call."""
        calls[key] += 1
        return (0.01, 0.02, 0.05)[(calls[key] - 1) % 3]

    noisy = profile(restless, BUCKETS, 100, HERE, clock=lambda: 0.0)
    assert noisy.noise == pytest.approx(0.5)
    assert any("WARNING step times are noisy" in line for line in noisy.lines())


def test_a_measured_row_knows_that_one_draft_more_runs_the_verify_program() -> None:
    """Two requests in the four-slot bucket: no draft costs the plain step of four, one draft the verify step of 8."""
    times = StepTimes(Machine().profile(budget_s=1e3).table, measured=True)
    curve = times.curve(2, 4, 100, 16)
    assert curve.tokens.tolist() == [2, 8, 16]
    assert curve.ms(2) == pytest.approx(milliseconds(Key("plain", 4, 4, 128)))
    assert curve.ms(3) == pytest.approx(milliseconds(Key("verify", 4, 8, 128)))
    assert times.draft_ms(4, 64) == pytest.approx(milliseconds(Key("draft", 4, 0, 64)))
    as_given = StepTimes(times.table, measured=False)
    assert as_given.curve(2, 4, 100, 16) == times.table.at(100, 4)
    short = as_given.curve(2, 4, 100, 10)  # the largest program holds 10 tokens
    assert short.tokens.tolist() == [4, 8, 10] and short.ms(10) == times.table.at(100, 4).ms(16)


def borrowing(models: Models, programs: Engine, **changes: Any) -> Engine:
    """An engine without step times that takes another one's compiled programs."""
    settings: dict[str, Any] = {
        "mode": "lagged",
        "slot_buckets": (4,),
        "token_buckets": (8, 12),
        "profile_seconds": 0.0,
    }
    engine = Engine(*models, engine_config(**{**settings, **changes}))
    engine._programs._table.update(programs._programs._table)
    return engine


def test_pieces_of_prompts_take_what_the_roofline_says() -> None:
    """The table holds steps of up to 1,024 slots and no prompts; the additive model of it tells a piece's time within
    15 %, too much context taken for none of its flops included."""
    chip, model = roofline.H100_SXM, roofline.QWEN3["qwen3-8b"]
    times = StepTimes(roofline.roofline_table(model, roofline.Draft(), chip, efficiency=0.6), measured=False)
    for tokens, context in ((64, 512), (256, 1024), (512, 4096), (2048, 4096), (16384, 4096)):
        wanted = roofline.step_ms(model, chip, tokens, 1, context, 0.6)
        assert times.piece_ms(tokens, context) == pytest.approx(wanted, rel=0.15)


def test_a_piece_beyond_the_table_grows_with_its_tokens() -> None:
    times = StepTimes(StepTimeTable(tokens=[1, 8, 9], milliseconds=[1.0, 2.0, math.inf]), measured=False)
    assert times.piece_ms(8, 64) == pytest.approx(2.0) and times.piece_ms(32, 64) == pytest.approx(8.0)
    never = StepTimes(StepTimeTable(tokens=[4], milliseconds=[math.inf]), measured=False)
    assert never.piece_ms(8, 64) == 0.0


def test_an_engine_measures_once_and_a_second_one_takes_what_was_kept(
    models: Models, lagged_engine: Engine, tmp_path: Path
) -> None:
    """Without a table an adaptive mode measures its own; the next start finds it; other programs are measured anew."""
    place = {"profile_dir": str(tmp_path)}
    lines: list[str] = []
    engine = borrowing(models, lagged_engine, **place)
    engine.warmup(lines.append)
    assert engine.mode == "lagged" and engine.notes == []
    assert lines[0].startswith("step times: 4 of 5 programs measured")
    assert not engine._state.active.any() and not engine._state.length.any()
    (kept,) = tmp_path.iterdir()
    table = StepTimeTable.load(kept)
    assert {name: getattr(table, name) for name in HERE} == origin(*models)
    assert [(r.slots, r.tokens.tolist()) for r in table.rows] == [(4, [4, 8, 12, 16])]

    fewer = {**place, "token_buckets": (8,)}
    for again, files, note in ((place, 1, f"step times: those of {kept}"), (fewer, 2, "programs measured")):
        lines.clear()
        borrowing(models, lagged_engine, **again).warmup(lines.append)
        assert note in lines[0] and len(list(tmp_path.iterdir())) == files
    engine.measure_step_times(lines.append)
    assert any("programs measured" in line for line in lines[1:])
    with pytest.raises(ValueError, match="mode fixed does not decide by step times"):
        Engine(*models, engine_config()).measure_step_times()


def test_what_is_measured_serves_requests_of_the_temperature_asked_for(
    models: Models, lagged_engine: Engine, tmp_path: Path
) -> None:
    """Greedy batches skip the noise, which step times of sampling ones would charge them for. A table that was kept is
    not taken for the other."""
    for temperature, files in ((0.0, 1), (1.0, 2)):
        engine = borrowing(models, lagged_engine, profile_dir=str(tmp_path), profile_temperature=temperature)
        engine._programs._temperature = temperature  # they are the other engine's
        engine.warmup()
        key = next(key for key in engine.buckets.keys(engine.window - 1) if key.kind == "draft")
        state, _ = engine._programs.rehearse(key, engine._state)
        assert state.sampling.temperature.tolist() == [temperature] * 4
        engine._state = engine._programs.rest(state)
        assert len(list(tmp_path.iterdir())) == files


def test_an_engine_that_nobody_warmed_up_measures_at_its_first_step(models: Models, lagged_engine: Engine) -> None:
    engine = borrowing(models, lagged_engine)
    assert all(tokens for tokens, _, _ in run_all(engine, random_requests(2, seed=1)))
    assert engine._times is not None and engine._times.measured


def test_a_kept_table_that_cannot_be_used_is_measured_again(tmp_path: Path, caplog: Any) -> None:
    table = StepTimeTable([1], [2.0], **HERE)
    store = Store(str(tmp_path), HERE, "programs")
    assert store.load() is None
    store.save(table)
    assert store.load() == table
    other = Store(str(tmp_path), {**HERE, "machine": "n"}, "programs")
    assert other.path != store.path and other.load() is None
    assert Store(str(tmp_path), HERE, "others").load() is None
    dataclasses.replace(table, machine="n").save(store.path)  # type: ignore[arg-type]
    assert store.load() is None and "another origin (machine" in caplog.text
    store.path.write_text("{")  # type: ignore[union-attr]
    assert store.load() is None and "measuring again" in caplog.text
    nowhere = Store("", HERE, "programs")
    nowhere.save(table)
    assert nowhere.load() is None


def test_a_file_of_another_machine_is_refused_and_an_object_is_not(tmp_path: Path) -> None:
    table = StepTimeTable([8], [2.0], **{**HERE, "model_hash": "other"})
    path = tmp_path / "table.json"
    table.save(path)
    with pytest.raises(ValueError, match="step_time: .*table.json was not measured here: model_hash"):
        given(path, HERE, BUCKETS)
    times = given(table, HERE, BUCKETS)
    assert times is not None and times.table is table and not times.measured
    dataclasses.replace(table, model_hash=HERE["model_hash"], commit="older").save(path)
    assert given(str(path), HERE, BUCKETS) is not None
    assert given(None, HERE, BUCKETS) is None


def test_the_model_hash_tells_models_of_other_shapes_apart() -> None:
    """Not weights: their values do not matter for times."""
    target, drafter = {"w": np.zeros((2, 3), np.float32)}, {"v": np.zeros(4)}
    assert model_hash(target, drafter) == model_hash({"w": np.ones((2, 3), np.float32)}, drafter)
    others = ({"w": np.zeros((3, 2), np.float32)}, {"w": np.zeros((2, 3))}, {"u": np.zeros((2, 3), np.float32)})
    assert len({model_hash(other, drafter) for other in (target, *others)}) == 4
    assert model_hash(target, drafter) != model_hash(target, None)
