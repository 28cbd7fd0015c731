"""A sliding-window drafter is asked for, trained, exported, read back and decoded with (paper, section 5.3.4)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import generate, load_drafter
from dspark_jax.checkpoint.deepspec import read_deepspec
from dspark_jax.config import Sampling
from dspark_jax.drafters import drafter_specs
from dspark_jax.train.config import DrafterShape, drafter_config
from dspark_jax.train.loop import Run
from tests.train import tiny_run

WINDOW, NEW = 3, 24


def windowed(folder: Path, window: int, **drafter: Any) -> Any:
    base = tiny_run.config(folder)
    shape = dataclasses.replace(base.drafter, sliding_window=window, bigram_start=False, **drafter)
    return dataclasses.replace(base, drafter=shape, optim=dataclasses.replace(base.optim, total_steps=2))


def test_an_export_with_a_window_reads_back_equal_and_is_where_another_run_begins(tmp_path: Path) -> None:
    """Of a Llama target, whose own class knows no windows. A run without the window does not begin with it."""
    target = tiny_run.target()
    run = Run(windowed(tmp_path, WINDOW), target, tmp_path / "run")
    export = run.export(tmp_path / "drafter", quantize=False)
    raw = json.loads((export / "config.json").read_text())
    assert raw["layer_types"] == ["sliding_attention"] and raw["sliding_window"] == WINDOW
    pieces = read_deepspec(export, drafter_specs)
    assert pieces.config == run.drafter and pieces.config.decoder.layers[0].window == WINDOW
    jax.tree.map(np.testing.assert_array_equal, pieces.params, run.state.params)

    again = Run(windowed(tmp_path, WINDOW, start_from=str(export)), target, tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    with pytest.raises(ValueError, match=r"another shape: sliding_window: \[3\], the run has \[0\]$"):
        Run(windowed(tmp_path, 0, start_from=str(export)), target, tmp_path / "other")


@pytest.mark.slow
def test_a_drafter_trained_with_a_window_drafts_exactly(tmp_path: Path) -> None:
    """What training measures depends on the window; coupled text in float64 is the plain one."""
    target = tiny_run.target()
    run = Run(windowed(tmp_path, WINDOW), target, tmp_path / "run")
    unwindowed = Run(windowed(tmp_path, 0), target, tmp_path / "full")
    assert run.evaluate()["width_3"]["tau"] != unwindowed.evaluate()["width_3"]["tau"]
    run.run()
    export = run.export(tmp_path / "drafter", quantize=False)
    with jax.enable_x64(True):
        exact = target.replace(params=jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), target.params))
        drafter = load_drafter(export, exact)
        prompts, lengths = jnp.asarray([[3, 4, 5, 6], [9, 9, 0, 0]], jnp.int32), jnp.asarray([4, 2], jnp.int32)
        options: dict[str, Any] = {
            "seeds": jnp.asarray([1, 2], jnp.uint32), "max_new_tokens": NEW, "sampling": Sampling(1.0)
        }  # fmt: skip
        plain = generate(exact, None, prompts, lengths, **options)
        fast = generate(exact, drafter, prompts, lengths, verification="coupled", **options)
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    assert (np.asarray(fast.committed) > 1).any(), "some drafts were accepted"


def test_a_window_is_refused_where_drafters_of_the_targets_family_have_none() -> None:
    config = tiny_run.target().config
    shape = DrafterShape(1, (0,), 1, sliding_window=8)
    assert drafter_config(shape, config).decoder.layers[0].window == 8
    with pytest.raises(ValueError, match=r"drafter\.sliding_window = 8: .* gemma4_text .* set 0"):
        drafter_config(shape, dataclasses.replace(config, family="gemma4_text"))
    with pytest.raises(ValueError, match="markov_rank and sliding_window must be 0 or more, found 256 and -1"):
        DrafterShape(1, (0,), 1, sliding_window=-1)
