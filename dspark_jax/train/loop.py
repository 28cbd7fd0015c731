"""A training run: resume, step, measure, save. What it writes, it writes into one folder.

``config.json``, ``environment.jsonl`` (a line a start), ``lock``, ``metrics.jsonl``, ``checkpoints/`` (orbax),
``drafter/`` (the newest export in DeepSpec's layout), ``d2t.npy``. Killed at any moment and started again, a run goes
on from its last checkpoint with the same numbers as one that was never killed.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.checkpoint.deepspec import write_deepspec
from dspark_jax.checkpoint.drafter_files import read_config
from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.data import ngrams
from dspark_jax.data.packing import BlockPlan
from dspark_jax.data.records import Batch, Records
from dspark_jax.drafters import drafter_specs
from dspark_jax.load import check_drafter, find_drafter
from dspark_jax.progress import Progress
from dspark_jax.targets import Target
from dspark_jax.train import heldout, warm_start
from dspark_jax.train.cached_teacher import open_cache
from dspark_jax.train.config import TrainConfig, drafter_config, fitted
from dspark_jax.train.folder import Metrics, check_same, environment, has_checkpoint, hold, vocabulary_of_checkpoint
from dspark_jax.train.objective import Frozen
from dspark_jax.train.optim import averaged, schedule
from dspark_jax.train.placement import Placement
from dspark_jax.train.read_text import ReadText, texts_read
from dspark_jax.train.step import TrainState, init_state, make_heldout_step, make_train_step
from dspark_jax.whole_file import DiskFull, is_disk_full, write_array

LOG = logging.getLogger("dspark_jax.train")


class NonFiniteLoss(RuntimeError):
    """Too many updates in a row without a finite loss; the last checkpoint is from before them."""


class OutOfText(RuntimeError):
    """The data set has no record left that this run has not seen."""


class Input(NamedTuple):
    """What a run reads, found in order."""

    config: TrainConfig  # fitted
    records: Records
    heldout: Records
    usable: np.ndarray  # of the training records, by number
    drafter: DrafterConfig


def read_input(config: TrainConfig, folder: str | Path, target: DecoderConfig) -> Input:
    """Checks a configuration against a run's folder, its data sets and its target's configuration; needs no weights.

    Raises ValueError where the folder holds a run that this configuration cannot continue, the data sets are too small,
    of another vocabulary, or the target cannot have such a drafter; FileNotFoundError where there are none.
    """
    given, config = config, fitted(config)
    check_same(given, Path(folder), write=False)
    drafter, start = drafter_config(config.drafter, target), config.drafter.start_from
    if start and not has_checkpoint(Path(folder)):  # a run that goes on needs it no more
        try:
            check_drafter(start)
            if ngrams.is_ngram(read_config(find_drafter(start))):
                raise ValueError(f"{start}: n-gram tables have no parameters to train")
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"drafter.start_from: {error}") from None
    data = config.data
    records, heldout = (Records(place).fitting(target.vocab_size) for place in (data.train, data.heldout))
    usable = records.usable(data.length, data.least_learnt)
    if len(usable) < data.batch:
        raise ValueError(
            f"{data.train}: {len(usable)} of {len(records)} records have {data.least_learnt} learnt tokens "
            f"among their first {data.length}; a batch needs {data.batch}"
        )
    wanted = data.heldout_batches * data.batch
    if len(heldout) < wanted:
        raise ValueError(f"{data.heldout}: {len(heldout)} records, but an evaluation needs {wanted}")
    return Input(config, records, heldout, usable, drafter)


class Run:
    """One run in one folder. ``run()`` trains to the end; ``export()`` writes the drafter as it is.

    With several processes (``jax.distributed``) every one makes the same Run; the first one writes.

    Raises what ``read_input`` raises.
    """

    def __init__(self, config: TrainConfig, target: Target, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._given = config
        self._writes = jax.process_index() == 0
        self._start_facts: dict[str, float] = {}  # of this start, for environment.jsonl
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config, self.records, self.heldout, self._usable, self.drafter = read_input(config, folder, target.config)
        config = self.config
        self._placement = Placement(config.devices, config.data.batch)
        self._manager = ocp.CheckpointManager(
            (self.folder / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=config.run.keep, enable_async_checkpointing=False),
            item_handlers=ocp.StandardCheckpointHandler(),
        )
        self._kept = self._beside_the_state()
        self._read = ReadText(self.records, self._usable, config.data)
        start, begins = config.drafter.start_from, self._manager.latest_step() is None
        self._earlier = warm_start.earlier_drafter(start, self.drafter, target) if start and begins else None
        if self._earlier is not None and (doubt := self._read.doubt(self._earlier.training, config.data.first)):
            LOG.warning("drafter.start_from: %s", doubt)
        self._read_before = texts_read(self._earlier.training) if self._earlier else self._kept.get("earlier", [])
        self.d2t = self._draft_vocabulary(target.vocab_limit)
        self._cache = open_cache(config, target, self.records)
        self.frozen = self._placement.everywhere(Frozen.build(target, self.d2t))
        data = config.data
        plan = BlockPlan.cycle(data.anchors // data.rounds, data.widths)
        self._heldout_plan = BlockPlan.cycle(data.heldout_anchors, data.heldout_widths)
        if chunks := config.loss.chunks:
            plan.part(chunks)  # says what is wrong before anything is compiled
            chunks = self._heldout_plan.most_parts(chunks)
        self._rate = schedule(config.optim)
        self._step = make_train_step(self.drafter, plan, data.rounds, config.loss, config.optim)
        self._measure = make_heldout_step(self.drafter, self._heldout_plan, chunks)
        self.state = self._restore(target)
        if self._cache is not None:
            begin, left = int(self.state.cursor), max(config.optim.total_steps - int(self.state.step), 0)
            self._cache.require(self._usable[begin : begin + left * config.data.batch])
        self._metrics: Metrics | None = None

    def _beside_the_state(self) -> dict[str, Any]:
        """What the last checkpoint says beside its arrays: the ``text`` it has read, and ``d2t``. Empty where there
        is none, or one of an older version."""
        latest = self._manager.latest_step()
        return {} if latest is None else dict(self._manager.metadata(latest).custom_metadata or {})

    def _draft_vocabulary(self, vocab_limit: int) -> np.ndarray | None:
        shape, path = self.config.drafter, self.folder / "d2t.npy"
        if not shape.draft_vocab:
            return None
        if self._manager.latest_step() is not None:
            d2t = vocabulary_of_checkpoint(path, self._kept)
            if path.is_file():
                return d2t
        # Without a checkpoint a file here is of a start that came to nothing, perhaps on other text.
        elif self._earlier is not None and self._earlier.d2t is not None:
            d2t = self._earlier.d2t
        else:
            d2t = warm_start.draft_vocabulary(self.records, shape.draft_vocab, vocab_limit, shape.always)
        if self._writes:
            write_array(path, d2t)
        return d2t

    def _restore(self, target: Target) -> TrainState:
        latest, first = self._manager.latest_step(), self.config.data.first
        earlier, positions = self._earlier, 0
        if earlier is None:
            params = self._first_params(target, latest is None)
        else:
            params, positions = earlier.params, earlier.positions
        state = init_state(params, self.config.optim, self.config.seed, cursor=first, positions=positions)
        state = self._placement.everywhere(state)
        if latest is None:
            return state
        LOG.info("resuming from step %d", latest)
        state = self._manager.restore(latest, args=ocp.args.StandardRestore(state))
        if "text" in self._kept:
            self._read.require(self._kept["text"])
        # Arrays restored by orbax may live in buffers that cannot be donated.
        return jax.tree.map(lambda x: jnp.array(x, copy=True), state)

    def _first_params(self, target: Target, used: bool) -> Any:
        """The parameters of a run that begins with no earlier drafter; not ``used``: only their shapes matter."""
        shape = self.config.drafter
        markov = None
        if used and shape.bigram_start and self.d2t is not None:
            markov = self._bigram_start(self.d2t, target.vocab_size)
        return warm_start.initial_params(
            target,
            self.drafter,
            jax.random.key(self.config.seed),
            copy_layers=shape.copy_layers,
            output_scale=shape.output_scale,
            markov=markov,
        )

    def _bigram_start(self, d2t: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        LOG.info("bigram start of the Markov head")
        shape, data, begun = self.config.drafter, self.config.data, time.process_time()
        text: Records | warm_start.Text = self.records
        if shape.bigram_records:
            ids = self._usable[data.first : data.first + shape.bigram_records]
            text = warm_start.joined(self.records, ids, data.length)
        factors = warm_start.bigram_factors(text, d2t, vocab_size, shape.markov_rank)
        self._start_facts["bigram_start_cpu_seconds"] = round(time.process_time() - begun, 2)
        return factors

    def run(self) -> None:
        """Trains until ``optim.total_steps``; the last state is saved, measured and exported.

        Raises ValueError where another process trains in the folder; NonFiniteLoss; DiskFull; or OutOfText when every
        record was seen once (the work is saved then, too).
        """
        try:
            self._begin()
            try:
                self._train()
            except OutOfText:
                self._finish()
                raise
            self._finish()
        except Exception as error:
            if is_disk_full(error):
                last = self._manager.latest_step()
                kept = "no checkpoint was written yet" if last is None else f"the checkpoint of step {last} is whole"
                raise DiskFull(
                    f"{self.folder}: no space left on the disk; {kept}. Make room and start again"
                ) from error
            raise
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def _begin(self) -> None:
        """Writes what a start writes."""
        if self._writes:
            hold(self.folder)
            check_same(self._given, self.folder)
            with open(self.folder / "environment.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({**environment(), **self._start_facts}) + "\n")
            self._metrics = Metrics(self.folder, int(self.state.step), tensorboard=self.config.run.tensorboard)
        if int(self.state.step) == 0:
            self.evaluate()

    def _train(self) -> None:
        rhythm, first, total = self.config.run, int(self.state.step), self.config.optim.total_steps
        last = min(total, first + (len(self._usable) - int(self.state.cursor)) // self.config.data.batch)
        started = saved = measured = time.monotonic()
        waiting: list[dict[str, Any]] = []
        read = 0  # tokens, padding not counted, since the last line
        with Progress(total, "training", done=first, unit="step", bar=None if self._writes else False) as progress:
            for step in range(first, total):
                batch, states = self._next_batch(), self._next_states()
                read += int(batch.lengths.sum())
                tokens, learnt = (self._placement.split(x) for x in (batch.tokens, batch.loss_mask))
                rate: Any = np.asarray(self._rate(step), np.float32)
                self.state, metrics = self._step(self.state, self.frozen, tokens, learnt, rate, states)
                waiting.append(metrics)
                if (step + 1) % rhythm.log_every and step + 1 != last:
                    continue
                jax.block_until_ready(self.state)
                now = time.monotonic()
                text = self._log_steps(step + 1, waiting, now - started, read)
                progress.advance(len(waiting), text)
                waiting, started, read = [], now, 0
                # Between lines of the log only: a resumed run then has the same lines as an unbroken one.
                if self._due(now - saved > rhythm.save_every_s) and int(self.state.skipped) == 0:
                    self.save()
                    saved = time.monotonic()
                if self._due(time.monotonic() - measured > rhythm.evaluate_every_s) and step + 1 != last:
                    paused = time.monotonic()
                    self.evaluate()
                    self.export()
                    measured = time.monotonic()
                    started += measured - paused  # not the steps' time

    def _due(self, mine: bool) -> bool:
        """What the first process's clock says: all must do the same."""
        if jax.process_count() == 1:
            return mine
        from jax.experimental import multihost_utils

        return bool(multihost_utils.broadcast_one_to_all(np.asarray(mine)))

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

    def _next_states(self) -> Any:
        """What the teacher said about the next batch, None where it is asked online. Raises DamagedShard."""
        if self._cache is None:
            return None
        data, cursor = self.config.data, int(self.state.cursor)
        known = self._cache.states(self._usable[cursor : cursor + data.batch], data.length)
        return tuple(map(self._placement.split, known))

    def save(self) -> None:
        """Writes a checkpoint of the whole state."""
        step = int(self.state.step)
        if self._manager.latest_step() != step:
            beside: dict[str, Any] = {
                "text": self._read.identity(int(self.state.cursor)), "earlier": self._read_before
            }  # fmt: skip
            if self.d2t is not None:
                beside["d2t"] = self.d2t.tolist()
            self._manager.save(step, args=ocp.args.StandardSave(self.state), custom_metadata=beside)
            self._manager.wait_until_finished()

    @property
    def params(self) -> Any:
        """The drafter's parameters, averaged where ``optim.ema_decay`` asks for it: what is measured and exported."""
        return averaged(self.state.params, self.state.opt_state)

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics, written to metrics.jsonl as well."""
        plan, everywhere = self._heldout_plan, self._placement.everywhere
        values = heldout.measure(
            self._measure, self.params, self.frozen, self.heldout, plan, self.config.data, everywhere
        )
        self._write({"heldout": values, "step": int(self.state.step), "positions": float(self.state.positions)})
        return values

    def export(self, folder: str | Path | None = None, *, quantize: bool = True) -> Path:
        """Writes the drafter in DeepSpec's layout (int8 rows if ``quantize``), the target's tables left out."""
        place = Path(folder) if folder is not None else self.folder / "drafter"
        if not self._writes:
            return place
        params = jax.tree.map(np.asarray, self.params)
        # ``records``: where in the text a run that starts from this drafter goes on (``data.first``).
        training: dict[str, Any] = {"steps": int(self.state.step), "positions": int(self.state.positions)}
        training |= self._read.identity(int(self.state.cursor))
        cursor, read = training["records"], self._read
        if other := [text for text in self._read_before if text["records"] > cursor or not read.is_same(text)]:
            training["earlier"] = other
        return write_deepspec(
            place,
            self.drafter,
            params,
            drafter_specs(self.drafter),
            d2t=self.d2t,
            quantize=quantize,
            extra_config={"training": training},
        )

    def _log_steps(self, step: int, waiting: list[dict[str, Any]], seconds: float, tokens: int) -> str:
        """Writes a line about the updates since the last one, which took ``tokens`` of text. Returns its short form.

        Raises NonFiniteLoss."""
        values = jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *waiting)
        good = np.isfinite(values["total"]) & np.isfinite(values["grad_norm"])
        line: dict[str, Any] = {
            "step": step,
            "positions": float(self.state.positions),
            "records": int(self.state.cursor),
            "total": _mean(values["total"][good]),
            "grad_norm": _mean(values["grad_norm"][good]),
            "learning_rate": float(self._rate(step - 1)),
            "seconds_per_step": seconds / len(waiting),
            "skipped": int((~good).sum()),
        }
        for name in ("ce", "l1", "confidence", "tau"):
            above, below = (part[good].sum() for part in values[name])
            line[name] = float(above / (below + 1e-6))
        self._write(line)
        in_a_row = int(self.state.skipped)
        if in_a_row >= self.config.run.max_skipped:
            saved = self._manager.latest_step()
            kept = "no checkpoint was written yet" if saved is None else f"the last checkpoint is of step {saved}"
            raise NonFiniteLoss(
                f"step {step}: {in_a_row} updates in a row without a finite loss; they changed nothing, and {kept}"
            )
        speed = tokens / seconds if seconds else 0.0
        terms = " ".join(f"{name} {line[name]:.3f}" for name in ("ce", "l1", "confidence"))
        return f"loss {line['total'] or 0.0:.3f} ({terms}), length {line['tau']:.2f}, {speed:.0f} tokens/s"

    def _write(self, line: dict[str, Any]) -> None:
        if not self._writes:
            return
        if self._metrics is None:  # outside of run(): nothing is rewound
            LOG.info("%s", json.dumps(line))
        else:
            self._metrics.append(line)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
