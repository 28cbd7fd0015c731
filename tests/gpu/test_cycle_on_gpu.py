"""The decoding cycle on a GPU computes the CPU's numbers (tiny models, float32, full-precision products)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Sampling, generate
from dspark_jax.layout import dense_layout
from dspark_jax.noise import NoiseKey, gumbel, row_bits
from dspark_jax.testing import tiny_drafter, tiny_target

pytestmark = pytest.mark.gpu

PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0], [5, 3, 5, 8, 0]], np.int32)
LENGTHS = np.array([5, 3, 4], np.int32)


def on(device: jax.Device, tree: Any) -> Any:
    return jax.device_put(tree, device)


def devices() -> tuple[jax.Device, jax.Device]:
    return jax.devices("cpu")[0], jax.devices("cuda")[0]


def text(device: jax.Device, target: Any, drafter: Any, **options: Any) -> np.ndarray:
    """Tokens of a generation that runs on ``device``."""
    arguments = on(device, (target, drafter, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS)))
    seeds = on(device, jnp.arange(3, dtype=jnp.uint32))
    with jax.default_device(device):
        return np.asarray(generate(*arguments, seeds=seeds, max_new_tokens=24, **options).tokens)


def test_noise_bits_are_identical_and_gumbel_values_agree_to_4e_6() -> None:
    key = NoiseKey(*(jnp.arange(64, dtype=jnp.int32) for _ in range(4)))
    ids = jnp.arange(4096)
    bits = [np.asarray(jax.jit(row_bits)(on(d, key), on(d, ids))) for d in devices()]
    np.testing.assert_array_equal(*bits)
    values = [np.asarray(gumbel(on(d, jnp.asarray(bits[0])), jnp.dtype(jnp.float32))) for d in devices()]
    assert np.abs(values[0] - values[1]).max() <= 4e-6


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logits_and_tapped_states_agree_to_1e_4(family: str, scan: bool) -> None:
    target = tiny_target(family, scan=scan)
    outputs = []
    for device in devices():
        with jax.default_device(device):
            layout = dense_layout(jnp.zeros(3, jnp.int32), jnp.asarray(LENGTHS), 5)
            there = on(device, target)
            hidden, taps, _ = there.forward(
                jnp.asarray(PROMPTS.reshape(-1)), layout, there.init_cache(3, 16), taps=(-1, 0, 2)
            )
            outputs.append([np.asarray(x) for x in (there.unembed(hidden), taps)])
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_greedy_speculative_text_on_gpu_is_the_cpu_plain_text(head: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target, head=head)
    cpu, cuda = devices()
    greedy = Sampling(temperature=0.0)
    np.testing.assert_array_equal(
        text(cuda, target, drafter, sampling=greedy), text(cpu, target, None, sampling=greedy)
    )


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_sampled_text_is_the_same_on_both_devices(verification: str) -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    options = {"sampling": Sampling(temperature=0.8, top_p=0.95), "verification": verification}
    cpu, cuda = devices()
    np.testing.assert_array_equal(text(cuda, target, drafter, **options), text(cpu, target, drafter, **options))
