"""A batch over one device, four devices, and two processes of two: the same losses."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.train.placement import Placement
from tests.train.test_kill import finish, lines, start


def together(folder: Path, *arguments: str) -> None:
    """Two processes of two devices each, until both have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    distributed = (*arguments, "--local-devices", "2", "--coordinator", address, "--processes", "2")
    processes = [start(folder, *distributed, "--process", str(i)) for i in range(2)]
    for process in processes:
        finish(process)


@pytest.mark.slow
def test_one_device_four_devices_and_two_processes_have_the_same_losses(tmp_path: Path) -> None:
    """Six steps of batch 4. Every sum and every denominator is global: total, each term and expected length agree to
    1e-5 relative (float32 sums in another order; seen: 4e-6), gradient norms to 1e-4 (seen: 2e-5)."""
    common = ("--steps", "6", "--batch", "4")
    finish(start(tmp_path / "one", *common))
    finish(start(tmp_path / "four", *common, "--local-devices", "4"))
    together(tmp_path / "two", *common)
    expected = lines(tmp_path / "one")
    assert len(expected) == 6
    for name in ("four", "two"):
        found = lines(tmp_path / name)
        assert len(found) == 6
        for key in ("total", "ce", "l1", "confidence", "grad_norm", "tau", "positions"):
            values = [[line[key] for line in rows] for rows in (found, expected)]
            np.testing.assert_allclose(*values, rtol=1e-4 if key == "grad_norm" else 1e-5, err_msg=f"{name} {key}")
    # Two processes that lost their last checkpoint go on from the one before, to the same line.
    before = lines(tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "6")
    together(tmp_path / "two", *common)
    assert lines(tmp_path / "two") == before


@pytest.mark.slow
def test_a_chain_has_the_same_losses_on_four_devices(tmp_path: Path) -> None:
    """EAGLE-3 by training-time test, six steps of batch 4; tolerances as above."""
    common = ("--steps", "6", "--batch", "4", "--method", "eagle3")
    finish(start(tmp_path / "one", *common))
    finish(start(tmp_path / "four", *common, "--local-devices", "4"))
    expected, found = lines(tmp_path / "one"), lines(tmp_path / "four")
    assert len(expected) == len(found) == 6
    for key in ("total", "ce", "l1", "grad_norm", "tau", "positions"):
        values = [[line[key] for line in rows] for rows in (found, expected)]
        np.testing.assert_allclose(*values, rtol=1e-4 if key == "grad_norm" else 1e-5, err_msg=key)


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    count = len(jax.devices())
    with pytest.raises(ValueError, match=f"devices = {count + 1}, but there are {count}"):
        Placement(count + 1, 8)
    whole = Placement(1, 3)
    tree = {"a": np.ones(2)}
    assert whole.everywhere(tree) is tree
