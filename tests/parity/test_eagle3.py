"""The EAGLE-3 case of the oracle: rounds, cache, greedy generations and stop runs of DeepSpec's own classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, generate, load_drafter, load_target
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.layout import dense_layout
from dspark_jax.nn.norm import rms_norm
from tests.drafters.chain_cases import Argmax
from tests.oracle import oracle_dir

NAMES = ("p0", "p1", "p2")
CELLS, WIDTH = 64, 24
NO_STOP = 100_000  # beyond the vocabulary: the same program serves runs with and without a stop token


@pytest.fixture(scope="module")
def case() -> tuple[Any, Any, dict[str, np.ndarray]]:
    folder = oracle_dir() / "qwen3_eagle3"
    target = load_target(folder.parent / "targets" / "qwen3_tiny", dtype="float32")
    drafter = load_drafter(folder / "draft", target)
    assert (drafter.block_size, drafter.taps) == (7, (0, 1, 2, 3, 4))
    arrays = np.load(folder / "expected.npz")
    return target, drafter, {key: arrays[key] for key in arrays.files if key.startswith(NAMES)}


@pytest.fixture(scope="module")
def rounds(case: Any) -> list[dict[str, Any]]:
    """The first three rounds of every prompt, rows side by side: features in, states and drafts out."""
    _, drafter, z = case

    @jax.jit
    def one(drafter, state, features, tokens, start, count, anchor):  # type: ignore[no-untyped-def]
        layout = dense_layout(start, count, WIDTH)
        state = drafter.absorb(state, features.reshape(-1, features.shape[-1]), layout, tokens.reshape(-1), count)
        proposal, hidden = drafter.walk(state, anchor, start + count, 7, Argmax(None))
        logits = base_logits(drafter.config, drafter.shared, rms_norm(hidden, drafter.params["norm"], 1e-6))
        return state, proposal.tokens, hidden, logits

    state, found = drafter.init(len(NAMES), CELLS), []
    for r in range(3):
        features = np.full((len(NAMES), WIDTH, 320), 5.0, np.float32)  # past the count: garbage
        tokens = np.zeros((len(NAMES), WIDTH), np.int32)
        count, start, anchor = (np.zeros(len(NAMES), np.int32) for _ in range(3))
        for row, name in enumerate(NAMES):
            new, ids = z[f"{name}.r{r}.ext_features"], z[f"{name}.r{r}.ext_input_ids"]
            start[row], count[row], anchor[row] = z[f"{name}.r{r}.cache_len_before"], len(new), ids[-1]
            before = z[f"{name}.prompt_ids"][0] if r == 0 else z[f"{name}.r{r - 1}.ext_input_ids"][-1]
            features[row, : len(new)], tokens[row, : len(new)] = new, [before, *ids[:-1]]
            np.testing.assert_array_equal(z[f"{name}.r{r}.ext_position_ids"], start[row] + np.arange(len(new)))
            assert start[row] + count[row] == z[f"{name}.r{r}.start"] == z[f"{name}.r{r}.cache_len_after"]
        arrays = [jnp.asarray(a) for a in (features, tokens, start, count, anchor)]
        state, drafted, hidden, logits = one(drafter, state, *arrays)
        found.append({"draft_tokens": drafted, "step_hidden": hidden, "draft_logits": logits, "state": state})
    return found


@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_the_references(case: Any, rounds: list[dict[str, Any]], name: str) -> None:
    z, row = case[2], NAMES.index(name)
    for r, got in enumerate(rounds):
        expected = {key: z[f"{name}.r{r}.{key}"] for key in ("step_hidden", "draft_logits", "draft_tokens")}
        np.testing.assert_array_equal(got["draft_tokens"][row], expected["draft_tokens"])
        for key in ("step_hidden", "draft_logits"):
            np.testing.assert_allclose(got[key][row], expected[key], atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(got["step_hidden"][row, 0], z[f"{name}.r{r}.draft_hidden"], atol=1e-4, rtol=1e-4)


def test_the_cache_is_the_references(case: Any, rounds: list[dict[str, Any]]) -> None:
    """The reference has extended its cache by the pair of the anchor before it drafts; ours writes that pair with
    the next forward, which begins with the anchor. The pair of position i lies in cell i + 1."""
    _, drafter, z = case
    start = int(z["p1.r2.start"])
    anchor = jnp.asarray(z["p1.r2.ext_input_ids"][-1:])
    layout = dense_layout(jnp.array([start]), jnp.array([1]), 1, NAMES.index("p1"))
    with jax.disable_jit():
        state = drafter.absorb(rounds[2]["state"], jnp.zeros((1, 320)), layout, anchor, layout.count)
    for got, key in ((state.cache.k, "cache_k"), (state.cache.v, "cache_v")):
        np.testing.assert_allclose(got[0][1, :, 1 : start + 1], z[f"p1.r2.{key}"][0], atol=1e-4, rtol=1e-4)


def run(case: Any, stop: int) -> Any:
    """Greedy generations of all prompts with one stop token, as host arrays."""
    target, drafter, z = case
    prompts = [z[f"{name}.prompt_ids"] for name in NAMES]
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = np.stack([np.pad(p, (0, lengths.max() - len(p))) for p in prompts])
    return jax.device_get(
        generate(
            target, drafter, jnp.asarray(padded), jnp.asarray(lengths), seeds=jnp.zeros(len(NAMES), jnp.uint32),
            max_new_tokens=64, sampling=Sampling(temperature=0.0), stop_token_ids=(stop,),
        )
    )  # fmt: skip


def test_greedy_generations_are_the_references(case: Any) -> None:
    """Tokens and committed entry by entry, up to the reference's last round (cut here, or absent)."""
    out, z = run(case, NO_STOP), case[2]
    for row, name in enumerate(NAMES):
        np.testing.assert_array_equal(out.tokens[row], z[f"{name}.gen.output_ids"])
        expected, offered = z[f"{name}.gen.acceptance_lengths"], z[f"{name}.gen.proposal_lengths"]
        known = len(expected) - 1
        np.testing.assert_array_equal(out.committed[row, :known], expected[:known])
        np.testing.assert_array_equal(out.offered[row, :known], offered[:known])
        assert out.committed[row].sum() == 63 and not out.committed[row, known + 1 :].any()


@pytest.mark.parametrize("kind", ["stop", "stop2"])
@pytest.mark.parametrize("name", NAMES)
def test_stop_runs_are_the_references(case: Any, name: str, kind: str) -> None:
    """Offered may be larger: the reference stops drafting behind a drafted stop token."""
    z, row = case[2], NAMES.index(name)
    out = run(case, int(z[f"{name}.{kind}.token"]))
    expected = {key: z[f"{name}.{kind}.{key}"] for key in ("output_ids", "acceptance_lengths", "proposal_lengths")}
    cycles = len(expected["acceptance_lengths"])
    assert out.lengths[row] == len(expected["output_ids"])
    np.testing.assert_array_equal(out.tokens[row, : out.lengths[row]], expected["output_ids"])
    np.testing.assert_array_equal(out.committed[row, :cycles], expected["acceptance_lengths"])
    assert not out.committed[row, cycles:].any()
    assert (out.offered[row, :cycles] >= expected["proposal_lengths"]).all()
