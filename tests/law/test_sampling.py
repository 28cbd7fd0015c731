"""Temperature, top-k, top-p and min-p against a reference that sorts, ties and float64 included; no sort in a cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import cycle
from dspark_jax.config import Sampling
from dspark_jax.sampling import SamplingRows, log_probs, mask_beyond, one_hot_log, sampling_rows
from dspark_jax.testing import open_slots, tiny_drafter, tiny_target
from tests.law.exact import distribution

SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1e-6, top_k=3),
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=1000),
    Sampling(top_p=0.05),
    Sampling(top_p=0.5),
    Sampling(top_p=0.95),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.7, top_k=12, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.6, top_p=0.9, min_p=0.02),
]
ROWS = [s for s in SETTINGS for _ in range(6)]

sampled = jax.jit(log_probs)


def logits_of(kind: str, dtype: type) -> np.ndarray:
    """``[rows, 40]``; ``ties``: only five different values; ``masked``: a third of the tokens at -inf."""
    rng = np.random.default_rng(4)
    x = 2.0 * rng.normal(size=(len(ROWS), 40))
    if kind == "ties":
        x = np.round(rng.integers(-2, 3, size=x.shape)).astype(np.float64)
    if kind == "masked":
        x[:, ::3] = -np.inf
    return x.astype(dtype)


def test_settings_beyond_the_device_s_numbers_keep_their_meaning() -> None:
    """float32 knows no 1e-50, int32 no 2^32 + 1: the smallest top_p keeps the best token, an endless temperature
    makes what is kept equal, a huge top_k keeps all."""
    logits = jnp.asarray([[0.0, 1.0, 2.0, -jnp.inf]])
    for setting, expected in (
        (Sampling(top_p=1e-50), [0, 0, 1, 0]),
        (Sampling(temperature=1e300), [1 / 3, 1 / 3, 1 / 3, 0]),
        (Sampling(temperature=1e39, top_p=1e-40), [1 / 3, 1 / 3, 1 / 3, 0]),
        (Sampling(top_k=2**32 + 1, temperature=1e39), [1 / 3, 1 / 3, 1 / 3, 0]),
    ):
        for rows in (sampling_rows(setting, 1), sampling_rows((setting,), 1)):
            np.testing.assert_allclose(np.exp(log_probs(logits, rows)), [expected], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [np.inf, 0.0, 1.0], [-np.inf] * 3])
def test_logits_that_are_no_distribution_do_not_pass_for_one(temperature: float, bad: list[float]) -> None:
    """NaN at the arg-max, whatever the temperature: verification ends the row there. Other rows are as they were."""
    logits = jnp.asarray([[0.0, 2.0, 1.0], bad])
    found = np.asarray(log_probs(logits, sampling_rows(Sampling(temperature), 2)))
    assert np.isnan(found[1, int(jnp.argmax(logits[1]))])
    np.testing.assert_array_equal(found[0], log_probs(logits[:1], sampling_rows(Sampling(temperature), 1))[0])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": "0.5"}, "temperature must be a number"),
        ({"temperature": None}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, found -1.0"),
        ({"temperature": np.nan}, "temperature must be a finite number"),
        ({"top_k": [1]}, "top_k must be a number"),
        ({"top_k": np.inf}, "top_k must be an integer"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"min_p": 1.1}, "min_p must be in"),
    ],
)
def test_bad_settings_are_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)


@pytest.mark.parametrize("kind", ["random", "ties", "masked"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_filters_are_those_of_a_reference_that_sorts(kind: str, dtype: type, x64: None) -> None:
    """The same kept set, and the same probabilities, for every setting in one mixed batch."""
    logits = logits_of(kind, dtype)
    found = np.exp(np.asarray(sampled(jnp.asarray(logits), sampling_rows(ROWS, len(ROWS)))))
    assert found.dtype == dtype
    for row, setting, got in zip(logits, ROWS, found, strict=True):
        expected = distribution(row, setting)
        np.testing.assert_array_equal(got > 0, expected > 0, err_msg=str(setting))
        np.testing.assert_allclose(got, expected, atol=2e-6 if dtype == np.float32 else 1e-13, err_msg=str(setting))


def test_ties_at_the_edge_are_kept() -> None:
    """By hand: probabilities 0.4, 0.2, 0.2, 0.2."""
    x = jnp.log(jnp.asarray([[0.4, 0.2, 0.2, 0.2]] * 4))
    kept = log_probs(
        x, sampling_rows([Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.5), Sampling(top_k=1)], 4)
    )
    assert (np.asarray(kept) > -np.inf).tolist() == [[True] * 4, [True] * 4, [True] * 4, [True, False, False, False]]


def test_the_order_is_temperature_top_k_top_p_min_p() -> None:
    """By hand: top-k first leaves 0.5, 0.3 of 0.5, 0.3, 0.2; renormalised 0.625 >= 0.6, so top-p keeps one.

    Top-p first would have kept two (0.5 < 0.6).
    """
    x = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]]))
    kept = sampled(x, sampling_rows(Sampling(top_k=2, top_p=0.6), 1))
    np.testing.assert_allclose(np.exp(np.asarray(kept)), [[1.0, 0.0, 0.0]], atol=1e-7)
    warm = sampled(x, sampling_rows(Sampling(temperature=100.0, top_p=0.6), 1))
    assert (np.asarray(warm) > -np.inf).tolist() == [[True, True, False]]


def test_temperature_zero_is_the_first_arg_max() -> None:
    """A one-hot distribution, ties to the lower token id, signed zeros equal."""
    x = jnp.asarray([[1.0, 3.0, 3.0], [0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]])
    assert np.exp(np.asarray(one_hot_log(x))).tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
    cold = sampled(x, sampling_rows(Sampling(temperature=0.0), 3))
    np.testing.assert_array_equal(np.asarray(cold), np.asarray(one_hot_log(x)))


def test_rows_without_a_filter_are_not_touched_by_those_with_one() -> None:
    """A mixed batch gives each row what it gets alone, bit for bit."""
    x = jnp.asarray(logits_of("random", np.float32)[:3])
    settings = [Sampling(), Sampling(top_k=4, top_p=0.7), Sampling(temperature=0.0)]
    mixed = sampled(x, sampling_rows(settings, 3))
    for i, setting in enumerate(settings):
        alone = sampled(x[i : i + 1], sampling_rows(setting, 1))
        np.testing.assert_array_equal(np.asarray(mixed[i]), np.asarray(alone[0]))


def test_columns_beyond_the_tokenizer_are_never_sampled() -> None:
    """By target id: the columns of a draft vocabulary are judged by where d2t sends them."""
    x = jnp.zeros((2, 4))
    assert (np.asarray(mask_beyond(x, None, 3)) == -np.inf).tolist() == [[False, False, False, True]] * 2
    ids = jnp.asarray([5, 0, 3, 1])
    assert (np.asarray(mask_beyond(x, ids, 3)) == -np.inf).tolist() == [[True, False, True, False]] * 2
    assert mask_beyond(x, None, 4) is x


def test_settings_of_a_batch_come_one_for_all_or_one_each() -> None:
    one = sampling_rows(Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), 2)
    each = sampling_rows([Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)] * 2, 2)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(each), strict=True):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()
    assert isinstance(one.take(jnp.asarray([1])), SamplingRows)
    with pytest.raises(ValueError, match="2 Sampling settings for 3 rows"):
        sampling_rows([Sampling()] * 2, 3)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 2.0),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


def primitives(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape of the first input) of every equation, inner programs included."""
    for equation in jaxpr.eqns:
        shape = getattr(getattr(equation.invars[0], "aval", None), "shape", ()) if equation.invars else ()
        yield equation.primitive.name, shape
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def test_no_cycle_sorts_the_vocabulary() -> None:
    """Neither ``sort`` nor ``top_k`` (which XLA's CPU backend turns into one) is in the program of a cycle."""
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(target, block_size=3)
    state = open_slots(
        target, drafter, jnp.ones((2, 3), jnp.int32), max_new_tokens=8, sampling=Sampling(0.7, 5, 0.9, 0.1)
    )

    def one(state: cycle.DecodeState) -> Any:
        proposal = cycle.draft(drafter, state, num_drafts=3)
        return cycle.step(target, drafter, state, proposal, jnp.asarray([3, 1]))

    names = {name for name, _ in primitives(jax.make_jaxpr(one)(state).jaxpr)}
    assert {"dot_general", "while", "cond"} <= names  # the walk does see inside
    assert not {name for name in names if "sort" in name or "top_k" in name}
