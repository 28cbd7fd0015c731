"""A training run: resume, step, measure, save. What it writes, it writes into one folder.

``config.json``, ``metrics.jsonl``, ``checkpoints/`` (orbax), ``drafter/`` (the newest export in DeepSpec's layout),
``d2t.npy``. Killed at any moment and started again, a run goes on from its last checkpoint with the same numbers as
one that was never killed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.config import DrafterConfig
from dspark_jax.data.packing import BlockPlan
from dspark_jax.data.records import Batch, Records
from dspark_jax.drafters.dspark import drafter_specs
from dspark_jax.targets import Target
from dspark_jax.train import heldout, warm_start
from dspark_jax.train.config import TrainConfig, drafter_config
from dspark_jax.train.objective import Frozen
from dspark_jax.train.optim import schedule
from dspark_jax.train.step import TrainState, init_state, make_heldout_step, make_train_step

LOG = logging.getLogger("dspark_jax.train")


class NonFiniteLoss(RuntimeError):
    """Too many steps in a row without a finite loss; the last checkpoint is from before them."""


class OutOfText(RuntimeError):
    """The data set has no record left that this run has not seen."""


class Run:
    """One run in one folder. ``run()`` trains to the end; ``export()`` writes the drafter as it is.

    Raises ValueError where the folder holds a run that this configuration cannot continue.
    """

    def __init__(self, config: TrainConfig, target: Target, folder: str | Path) -> None:
        self.config, self.folder = config, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_same(config, self.folder)
        self.records, self.heldout = Records(config.data.train), Records(config.data.heldout)
        self._usable = self.records.usable(config.data.length, config.data.least_learnt)
        self.drafter: DrafterConfig = drafter_config(config.drafter, target.config)
        self.d2t = self._draft_vocabulary(target.vocab_size)
        self.frozen = Frozen.build(target, self.d2t)
        data = config.data
        plan = BlockPlan.cycle(data.anchors // data.rounds, data.widths)
        self._rate = schedule(config.optim)
        self._step = make_train_step(self.drafter, plan, data.rounds, config.loss, config.optim)
        self._heldout_plan = BlockPlan.cycle(data.heldout_anchors, data.heldout_widths)
        self._measure = make_heldout_step(self.drafter, self._heldout_plan)
        self._manager = ocp.CheckpointManager(
            (self.folder / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=config.run.keep, enable_async_checkpointing=False),
        )
        self.state = self._restore(target)

    def _draft_vocabulary(self, vocab_size: int) -> np.ndarray | None:
        shape, path = self.config.drafter, self.folder / "d2t.npy"
        if not shape.draft_vocab:
            return None
        if not path.is_file():
            np.save(path, warm_start.draft_vocabulary(self.records, shape.draft_vocab, vocab_size, shape.always))
        return np.load(path)

    def _restore(self, target: Target) -> TrainState:
        latest = self._manager.latest_step()
        shape = self.config.drafter
        markov = None
        if latest is None and shape.bigram_start and self.d2t is not None:
            LOG.info("bigram start of the Markov head")
            markov = warm_start.bigram_factors(self.records, self.d2t, target.vocab_size, shape.markov_rank)
        params = warm_start.initial_params(
            target,
            self.drafter,
            jax.random.key(self.config.seed),
            copy_layers=shape.copy_layers,
            output_scale=shape.output_scale,
            markov=markov,
        )
        state = init_state(params, self.config.optim, self.config.seed)
        if latest is None:
            return state
        LOG.info("resuming from step %d", latest)
        state = self._manager.restore(latest, args=ocp.args.StandardRestore(state))
        # Arrays restored by orbax may live in buffers that cannot be donated.
        return jax.tree.map(lambda x: jnp.array(x, copy=True), state)

    def run(self) -> None:
        """Trains until ``optim.total_steps``; the last state is saved, measured and exported.

        Raises NonFiniteLoss, or OutOfText when every record was seen once (the work is saved then, too).
        """
        if int(self.state.step) == 0:
            self.evaluate()
        try:
            self._train()
        except OutOfText:
            self._finish()
            raise
        self._finish()

    def _train(self) -> None:
        rhythm = self.config.run
        started = saved = measured = time.monotonic()
        waiting: list[dict[str, Any]] = []
        for step in range(int(self.state.step), self.config.optim.total_steps):
            batch = self._next_batch()
            tokens, learnt = jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask)
            rate = jnp.asarray(self._rate(step), jnp.float32)
            self.state, metrics = self._step(self.state, self.frozen, tokens, learnt, rate)
            waiting.append(metrics)
            if (step + 1) % rhythm.log_every == 0:
                jax.block_until_ready(self.state)
                now = time.monotonic()
                self._log_steps(step + 1, waiting, (now - started) / len(waiting))
                waiting, started = [], now
            if time.monotonic() - saved > rhythm.save_every_s:
                self.save()
                saved = time.monotonic()
            if time.monotonic() - measured > rhythm.evaluate_every_s:
                paused = time.monotonic()
                self.evaluate()
                self.export()
                measured = time.monotonic()
                started += measured - paused  # not the steps' time

    def _finish(self) -> None:
        self.save()
        self.evaluate()
        self.export()

    def _next_batch(self) -> Batch:
        data, cursor = self.config.data, int(self.state.cursor)
        if cursor + data.batch > len(self._usable):
            raise OutOfText(
                f"{data.train}: all {len(self._usable)} records with {data.least_learnt} learnt tokens or more are "
                "used; text is not repeated"
            )
        return self.records.batch(self._usable[cursor : cursor + data.batch], data.length)

    def save(self) -> None:
        """Writes a checkpoint of the whole state."""
        step = int(self.state.step)
        if self._manager.latest_step() != step:
            self._manager.save(step, args=ocp.args.StandardSave(self.state))
            self._manager.wait_until_finished()

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics, written to metrics.jsonl as well."""
        values = heldout.measure(
            self._measure, self.state.params, self.frozen, self.heldout, self._heldout_plan, self.config.data
        )
        self._write({"heldout": values, "step": int(self.state.step), "positions": float(self.state.positions)})
        return values

    def export(self, folder: str | Path | None = None, *, quantize: bool = True) -> Path:
        """Writes the drafter in DeepSpec's layout (int8 rows if ``quantize``), the target's tables left out."""
        params = jax.tree.map(np.asarray, self.state.params)
        seen = {"training": {"steps": int(self.state.step), "positions": int(self.state.positions)}}
        return write_deepspec(
            folder or self.folder / "drafter",
            self.drafter,
            params,
            drafter_specs(self.drafter),
            d2t=self.d2t,
            quantize=quantize,
            extra_config=seen,
        )

    def _log_steps(self, step: int, waiting: list[dict[str, Any]], seconds: float) -> None:
        values = jax.tree.map(lambda *parts: np.concatenate(parts), *waiting)
        line: dict[str, Any] = {
            "step": step,
            "positions": float(self.state.positions),
            "records": int(self.state.cursor),
            "total": float(values["total"].mean()),
            "grad_norm": float(values["grad_norm"].mean()),
            "learning_rate": float(self._rate(step - 1)),
            "seconds_per_step": seconds,
        }
        for name in ("ce", "l1", "confidence"):
            line[name] = float(values[name][0].sum() / (values[name][1].sum() + 1e-6))
        self._write(line)
        if int(self.state.skipped) >= self.config.run.max_skipped:
            raise NonFiniteLoss(f"step {step}: {int(self.state.skipped)} steps in a row without a finite loss")

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps({**line, "time": time.strftime("%Y-%m-%d %H:%M:%S")})
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(text + "\n")
        LOG.info("%s", text)


# What a run may be continued with; everything else would make it another run.
_MAY_CHANGE = ("optim.total_steps", "optim.decay_steps", "run.", "data.")


def _check_same(config: TrainConfig, folder: Path) -> None:
    """Writes the configuration, or compares it with that of the run to be continued."""
    path = folder / "config.json"
    mine = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        a, b = _flat(mine), _flat(theirs)
        wrong = [f"{k}: {b.get(k)!r} -> {a.get(k)!r}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
        wrong = [line for line in wrong if not line.startswith(_MAY_CHANGE)]
        if wrong:
            raise ValueError(f"{folder} holds another run: " + "; ".join(wrong))
    path.write_text(json.dumps(mine, indent=2) + "\n", encoding="utf-8")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
