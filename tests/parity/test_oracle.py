"""Every array of the reference's cases, within the tolerances its README states.

The arrays are what ``scripts/parity.py`` writes. Token ids and lengths are exact. A run that ended at the limit may
have one more round in the reference, which cuts its output afterwards: its last entry is left out (README section 2).
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.evaluate.parity import compute, load_case
from tests.oracle import oracle_dir

CASES = (  # one of each way through the code by default, all of them in CI
    "qwen3_dspark_vanilla",
    pytest.param("qwen3_dspark_gated", marks=pytest.mark.slow),
    pytest.param("qwen3_dspark_rnn", marks=pytest.mark.slow),
    pytest.param("qwen3_dflash", marks=pytest.mark.slow),
    "qwen3_eagle3",
    pytest.param("gemma4_dspark", marks=pytest.mark.slow),  # tests/parity/test_gemma4_*.py are quicker
)
LENGTHS = ("acceptance_lengths", "accepted_draft_lengths", "proposal_lengths", "round_starts")
TIGHT = ("accept_rate", "prob_of_label", "_loss", "_num", "_den", "grad_norm")
WHOLE = ("eval_mask", "loss_weights")


@pytest.fixture(scope="module", params=CASES)
def arrays(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``(got, expected)`` of one case."""
    folder = oracle_dir() / request.param
    with np.load(folder / "expected.npz") as file:
        expected = {name: file[name] for name in file.files}
    got = compute(load_case(folder))
    mask = expected.get("train.eval_mask", np.zeros((0, 0, 0)))
    for name, want in expected.items():
        # Slots outside the mask hold whatever the reference computes there; the mask itself is compared as it is.
        if name.startswith("train.") and want.shape[:3] == mask.shape and not name.endswith(WHOLE) and name in got:
            got[name], expected[name] = got[name][mask], want[mask]
    return got, expected


def test_every_array_is_there(arrays: tuple[dict, dict]) -> None:
    got, expected = arrays
    assert not sorted(expected.keys() - got.keys())


def test_token_ids_and_counts_are_exact(arrays: tuple[dict, dict]) -> None:
    got, expected = arrays
    checked = 0
    for name, want in expected.items():
        if want.dtype.kind in "iub" and not name.endswith(LENGTHS):
            np.testing.assert_array_equal(got[name], want, err_msg=name)
            checked += 1
    assert checked > 50
    np.testing.assert_array_equal(got["train.grad_norm_names"], expected["train.grad_norm_names"])


def test_committed_and_offered_lengths_are_exact(arrays: tuple[dict, dict]) -> None:
    got, expected = arrays
    for name, want in expected.items():
        if not name.endswith(LENGTHS):
            continue
        run = name.rsplit(".", 1)[0]
        at_limit = run.endswith((".gen", ".thr")) or len(expected[f"{run}.output_ids"]) == 64
        # Ours is cut at the limit, or absent where all tokens were known already.
        rounds = len(want) - 1 if at_limit else len(want)
        mine = got[name][:rounds]
        if name.endswith("proposal_lengths") and run.endswith(("stop", "stop2")):
            # The reference's EAGLE-3 stops drafting behind a drafted stop token, ours does not.
            mine = np.minimum(mine, want[:rounds]) if "p0.r0.step_hidden" in expected else mine
        np.testing.assert_array_equal(mine, want[:rounds], err_msg=name)
        assert rounds <= len(got[name]) <= len(want), name


def test_floats_are_within_the_stated_tolerances(arrays: tuple[dict, dict]) -> None:
    got, expected = arrays
    for name, want in expected.items():
        if want.dtype.kind == "f":
            limit = 1e-5 if any(part in name for part in TIGHT) else 1e-4
            np.testing.assert_allclose(got[name], want, atol=limit, rtol=limit, err_msg=name)


@pytest.mark.parametrize("kind", ["qwen3_mystery", "mystery_dspark"])
def test_a_kind_that_is_not_supported_ends_the_script_with_status_2(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a message that names it; nothing is written."""
    (tmp_path / "case.json").write_text(f'{{"kind": "{kind}"}}')
    monkeypatch.setattr("sys.argv", ["parity.py", str(tmp_path), "--out", str(tmp_path / "got.npz")])
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "parity.py"))
    assert script["main"]() == 2
    assert kind in capsys.readouterr().err
    assert not (tmp_path / "got.npz").exists()


def test_a_case_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["parity.py", str(tmp_path / "nowhere"), "--out", str(tmp_path / "got.npz")])
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "parity.py"))
    assert script["main"]() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "nowhere/case.json" in error and error.count("\n") == 1
