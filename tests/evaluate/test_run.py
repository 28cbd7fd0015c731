"""A whole evaluation with scripted models: its numbers are those of ``generate``, and killed it goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config_toml import from_mapping, load_toml
from dspark_jax.data.line_file import LineFile
from dspark_jax.evaluate import decode, run
from dspark_jax.evaluate.config import DecodeConfig, DrafterEntry, EvaluateConfig, SamplingRun, Suite
from dspark_jax.evaluate.decode import Job
from dspark_jax.evaluate.run import Evaluation, plan
from dspark_jax.evaluate.suites import Task
from dspark_jax.generate import generate
from dspark_jax.progress import Progress
from dspark_jax.testing import ScriptedDrafter, ScriptedTarget

VOCAB, BLOCK, NEW = 7, 3, 12
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def models(monkeypatch: Any) -> dict[str, Any]:
    """A target; ``good`` and ``bad`` drafters, of which only the first has confidences, found by path."""
    rng = np.random.default_rng(0)
    table = 1.5 * rng.normal(size=(VOCAB + 1, VOCAB))
    confidence = jnp.asarray(rng.normal(size=(BLOCK, VOCAB + 1)) + 0.5)
    found = {
        "target": ScriptedTarget(jnp.asarray(table), max_positions=64),
        "good": ScriptedDrafter(
            jnp.asarray(np.stack([table + 0.4 * rng.normal(size=table.shape)] * BLOCK)), confidence, vocab_size=VOCAB
        ),
        "bad": ScriptedDrafter(jnp.asarray(rng.normal(size=(BLOCK, *table.shape))), vocab_size=VOCAB),
    }
    monkeypatch.setattr(run, "load_drafter", lambda path, target, dtype: found[path])
    monkeypatch.setattr(decode, "find_drafter", Path)
    monkeypatch.setattr(decode, "fingerprint", str)
    monkeypatch.setattr(decode, "MAX_PROGRAMS", 1)
    return found


def config(tmp_path: Path, **changes: Any) -> EvaluateConfig:
    suites = []
    for j, name in enumerate(("first", "second")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt_ids": [j, i % VOCAB, 1][: 1 + i % 3]}) + "\n" for i in range(5)))
        suites.append(Suite(name, path, prompts=4 - j))
    values: dict[str, Any] = {
        "target": "scripted",
        "drafters": (DrafterEntry("good", "good"), DrafterEntry("bad", "bad", 2)),
        "suites": tuple(suites),
        "runs": (SamplingRun("greedy", 0.0), SamplingRun("warm", 0.8, verification="coupled")),
        "decode": DecodeConfig(max_new_tokens=NEW, max_num_seqs=3, max_model_len=40),
        "thresholds": (0.0, 0.6),
        "bootstrap": 50,
    }
    return EvaluateConfig(**{**values, **changes})


@pytest.mark.slow
def test_an_evaluation_measures_what_generate_does_and_resumes(tmp_path: Path, models: Any, monkeypatch: Any) -> None:
    """Greedy and coupled: every text is the plain one. The cycles are those of ``generate``, under a threshold too. A
    second process that finds records cut off in a line makes the same report; a drafter without a confidence head has
    no sweep."""
    first = Evaluation(config(tmp_path), tmp_path / "out", models["target"]).run()
    for name in ("greedy", "warm"):
        rows = {row["name"]: row for row in first["runs"][name]}
        assert list(rows) == ["plain", "good", "bad"]
        assert all(row["equal_texts"] == row["prompts"] == 7 for row in rows.values())
        assert rows["plain"]["tau"]["macro"]["value"] == 1.0
        assert rows["good"]["tau"]["macro"]["value"] > rows["bad"]["tau"]["macro"]["value"] > 1.0
        assert len(rows["bad"]["conditional"]) == 2 and rows["bad"]["tau_ratio"]["value"] < 1.0
        assert rows["good"]["tau"]["macro"]["low"] <= rows["good"]["tau"]["macro"]["value"]

    # generate() on the second set's three prompts: seeds 0, 1, 2.
    out = generate(
        models["target"],
        models["good"],
        jnp.asarray([[1, 0, 0], [1, 1, 0], [1, 2, 1]], jnp.int32),
        jnp.asarray([1, 2, 3]),
        seeds=jnp.arange(3, dtype=jnp.uint32),
        max_new_tokens=NEW,
        sampling=SamplingRun("greedy", 0.0).sampling(),
        admit="threshold",
        confidence_threshold=0.6,
    )
    lines = (tmp_path / "out" / "records" / "greedy" / "good@0.6.jsonl").read_text().splitlines()[1:]
    traces = {(t["suite"], t["index"]): t["committed"] for t in map(json.loads, lines)}
    assert [traces["second", i] for i in range(3)] == [[c for c in row if c] for row in out.committed.tolist()]

    sweep = first["sweeps"]["greedy"]
    assert list(sweep) == ["good"] and [r["threshold"] for r in sweep["good"]] == [0.0, 0.6]
    assert sweep["good"][1]["rate"]["value"] > sweep["good"][0]["rate"]["value"]
    assert "warm" not in first["sweeps"]  # only the first way of sampling is swept

    path = tmp_path / "out" / "records" / "warm" / "plain.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]) + b'{"suite": "fir')
    again = Evaluation(config(tmp_path), tmp_path / "out", models["target"]).run()

    def timeless(results: Any) -> Any:
        drop = ("tokens_per_s", "speed")
        return {k: [{n: v for n, v in r.items() if n not in drop} for r in rows] for k, rows in results["runs"].items()}

    assert timeless(again) == timeless(first)
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines())

    report = (tmp_path / "out" / "report.md").read_text()
    assert "| good | " in report and "Confidence threshold, greedy, good" in report
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == json.loads(json.dumps(again))

    changed = config(tmp_path, decode=DecodeConfig(max_new_tokens=NEW, max_num_seqs=3, max_model_len=40, seed=5))
    with pytest.raises(ValueError, match=r"decode\.seed: 0 -> 5"):
        Evaluation(changed, tmp_path / "out", models["target"]).run()


def test_a_record_of_another_prompt_is_refused_with_its_file_and_number(tmp_path: Path) -> None:
    """The file of prompts was edited: its records do not become those of the new text. A set may still grow, and
    records that are older than the hash are taken as they are."""
    tasks = [Task("a", i, (i, 1), 0) for i in range(2)]
    line: dict[str, Any] = {"suite": "a", "tokens": [1], "committed": [1], "offered": [1], "finish": "length"}
    line |= {"seconds": 1.0, "emitted": 1}
    job, settings = Job(SamplingRun("greedy", 0.0), None), DecodeConfig()
    with closing(LineFile(tmp_path / "plain.jsonl", {})) as file:
        file.append({**line, "index": 0})
        file.append({**line, "index": 1, "prompt": decode.digest((1, 1))})
    with closing(LineFile(tmp_path / "plain.jsonl", {})) as file, Progress(2, "", bar=False) as bar:
        assert [t.index for t in decode.run_job(None, job, tasks, settings, (), file, bar)] == [0, 1]
        changed = [tasks[0], Task("a", 1, (1, 2), 0)]
        with pytest.raises(ValueError, match=r"plain\.jsonl: prompt 1 of a is another one .* or delete this file"):
            decode.run_job(None, job, changed, settings, (), file, bar)


def test_figures_are_written_with_matplotlib_and_left_out_without(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    from dspark_jax.evaluate import figures

    point = {"value": 1.5, "low": 1.2, "high": 1.8}
    rows = [{"name": "d", "tau": {"a": point, "macro": point, "all": point}, "conditional": [point, point]}]
    rows.append({"name": "plain", "tau": rows[0]["tau"], "conditional": []})
    sweep = {"d": [{"threshold": t, "tau": point, "rate": point} for t in (0.0, 0.5)]}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert not figures.acceptance(tmp_path / "a.png", "greedy", rows)
    assert not (tmp_path / "a.png").exists() and "matplotlib is not installed" in caplog.text
    pytest.importorskip("matplotlib")
    assert figures.acceptance(tmp_path / "a.png", "greedy", rows)
    assert figures.threshold_sweep(tmp_path / "b.png", sweep)
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_plan_sweeps_the_named_ways_of_sampling(tmp_path: Path) -> None:
    jobs = plan(config(tmp_path, plain=False, threshold_runs=("warm",)))
    assert [job.file for job in jobs] == [
        "greedy/good.jsonl",
        "warm/good.jsonl",
        "warm/good@0.6.jsonl",
        "greedy/bad.jsonl",
        "warm/bad.jsonl",
        "warm/bad@0.6.jsonl",
    ]


def test_the_shipped_configuration_loads_and_mistakes_are_named() -> None:
    shipped = load_toml(ROOT / "configs" / "evaluate" / "smollm2.toml", EvaluateConfig, ["decode.max_new_tokens=64"])
    assert shipped.decode.max_new_tokens == 64 and [s.prompts for s in shipped.suites] == [24, 12, 12, 24]
    base = {"target": "t", "drafters": [], "suites": [{"name": "a", "path": "b"}]}
    for change, why in (
        ({"speed": 1}, "unknown key speed"),
        ({"drafters": [{"name": "plain", "path": "x"}]}, "must be a word other than 'plain'"),
        ({"suites": [{"name": "a", "path": "b"}] * 2}, "suites: names must differ"),
        ({"thresholds": [1.5]}, r"thresholds must lie in \[0, 1\]"),
        ({"threshold_runs": ["cold"]}, "no such runs: cold"),
        ({"runs": [{"name": "x", "temperature": -1}]}, "temperature must be"),
        ({"decode": {"max_new_tokens": 0}}, "counts must be positive"),
        ({"plain": False}, "nothing to measure"),
    ):
        with pytest.raises(ValueError, match=why):
            from_mapping(EvaluateConfig, {**base, **change}, source="x")
