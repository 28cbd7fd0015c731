"""A training run as data; read from TOML by ``config_toml.load_toml``. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dspark_jax.config import EMPTY, DecoderConfig, DrafterConfig, Eagle3Norms
from dspark_jax.config_io.families import FAMILIES

BY_METHOD = -1
"""A setting that follows the drafter's method."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text is and how it is cut.

    Attributes:
        train, heldout: folders of ``data/records.py``.
        length: tokens of a sequence (longer records are cut).
        least_learnt: records with fewer learnt tokens are passed over.
        first: records of the training text that are passed over: those that the drafter it starts from has seen.
        batch: sequences a step.
        anchors: blocks a sequence.
        rounds: optimiser updates a step; each takes its share of every sequence's anchors, so that one pass of the
            target serves many small updates.
        widths: pattern of block widths over a sequence's anchors; the widest stands for the whole block, whatever
            the drafter's block size is (``fitted``). Of a chain: its numbers of steps.
        teacher_cache: folder of ``scripts/cache_teacher.py`` to read the target's states of the training text from;
            none: the target runs. Held-out text is always read by the target itself.
        heldout_batches: batches of an evaluation.
        heldout_anchors, heldout_widths: blocks measured a sequence, and the pattern of their widths.
    """

    train: Path
    heldout: Path
    length: int = 384
    least_learnt: int = 2
    first: int = 0
    batch: int = 2
    anchors: int = 160
    rounds: int = 1
    widths: tuple[int, ...] = (7,)
    teacher_cache: Path | None = None
    heldout_batches: int = 6
    heldout_anchors: int = 160
    heldout_widths: tuple[int, ...] = (7,)

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.anchors % self.rounds:
            raise ValueError(f"anchors = {self.anchors} cannot be shared among rounds = {self.rounds}")
        for name in ("length", "batch", "anchors", "heldout_batches", "heldout_anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, found {getattr(self, name)}")
        if self.first < 0:
            raise ValueError(f"first must be 0 or more records, found {self.first}")
        for name in ("anchors", "heldout_anchors"):
            if getattr(self, name) > self.length:
                raise ValueError(f"{name} = {getattr(self, name)} blocks do not begin at {self.length} tokens (length)")


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """The drafter to train; what is not said here is the target's.

    Attributes:
        layers: draft layers, shaped like the target's; a chain has one.
        method: ``dspark`` (DFlash, where neither head is asked for), ``eagle3`` or ``mtp``.
        start_from: a drafter of this shape, by name or folder, whose parameters and draft vocabulary the run begins
            with, and whose positions it counts on from; ``copy_layers``, ``output_scale``, ``bigram_start``,
            ``bigram_records`` and ``always`` then play no part. Optimizer moments begin anew.
        block_size: G, drafts a block; of a chain: the steps it is trained for.
        mask_token_id: of block drafters.
        norms: switches of EAGLE-3.
        sliding_window: positions that a token of the draft layers sees, its own included; 0: full attention.
        markov_rank: of the Markov head, 0 for none; ``BY_METHOD``: the paper's 256 for ``dspark``, none for a chain.
        copy_layers: target layers they begin as, consecutive; empty: random. Where ``layers`` is another number, the
            last ones, or those before them as well (``fitted``).
        output_scale: factor of the final norm at the beginning (``warm_start.initial_params``).
        bigram_start: the Markov head begins with the text's bigrams.
        bigram_records: those of the first so many records that the run trains on, cut as it cuts them; 0: of the whole
            training text, also of what the run never comes to.
        draft_vocab: tokens of the draft vocabulary, 0 for the whole one.
        always: token ids that belong to it whatever their count.
        block_widths: widths listed in the checkpoint as trained.
    """

    layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int = EMPTY
    method: Literal["dspark", "eagle3", "mtp"] = "dspark"
    start_from: str = ""
    block_size: int = 7
    block_widths: tuple[int, ...] = ()
    copy_layers: tuple[int, ...] = ()
    output_scale: float = 1.0
    markov_rank: int = BY_METHOD
    markov_head: str = "vanilla"
    bigram_start: bool = False
    bigram_records: int = 0
    confidence_head: bool = True
    draft_vocab: int = 0
    always: tuple[int, ...] = ()
    norms: Eagle3Norms = Eagle3Norms()
    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.markov_rank == BY_METHOD:  # known from here on as what it stands for, in config.json as well
            object.__setattr__(self, "markov_rank", 256 if self.method == "dspark" else 0)
        if min(self.markov_rank, self.sliding_window) < 0:
            raise ValueError(
                f"markov_rank and sliding_window must be 0 or more, found {self.markov_rank} and {self.sliding_window}"
            )
        if self.bigram_records < 0:
            raise ValueError(f"bigram_records must be 0 (all) or more, found {self.bigram_records}")
        if self.bigram_start and not (self.draft_vocab and self.markov_rank or self.start_from):
            raise ValueError(
                "bigram_start fits a Markov head to the pairs of a trimmed draft vocabulary: set markov_rank and "
                "draft_vocab as well, or bigram_start = false"
            )
        if self.method == "dspark":
            return
        heads = ("markov_rank", "bigram_start", "confidence_head")
        extra = [f"{name} = {getattr(self, name)}" for name in heads if getattr(self, name)]
        extra += [f"markov_head = {self.markov_head}"] if self.markov_head != "vanilla" else []
        if extra:
            raise ValueError(
                f"method = {self.method}: such drafters have neither Markov nor confidence head, found "
                f"{', '.join(extra)}: set markov_rank = 0, bigram_start = false, confidence_head = false, and leave "
                "markov_head out"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of cross entropy, L1 and confidence (equation 12), and the decay over positions (equation 8).

    Attributes:
        soft: the cross entropy is against the target's distribution, not the text's token (EAGLE-3).
        chunks: equal parts of the anchors whose logits are made, compared and thrown away one after the other; for
            large vocabularies. 0: all at once, the target's probabilities made once a step (faster where they fit).
        bfloat16: the drafter runs forwards and backwards on a copy of its weights in bfloat16, which is what tensor
            cores and TPUs multiply; weights, moments, softmax and sums stay float32.
    """

    weights: tuple[float, ...] = (0.1, 0.9, 1.0)
    decay: float = 4.0
    soft: bool = False
    chunks: int = 0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if len(self.weights) != 3 or self.decay <= 0 or self.chunks < 0:
            raise ValueError(f"the loss needs three weights, a positive decay and chunks of 0 or more, found {self}")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule (``optim.schedule``).

    Attributes:
        ema_decay: of a running mean of the parameters, which is then what is measured and exported; 0: none.
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 50
    total_steps: int = 1000
    decay_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"ema_decay must lie in [0, 1), found {self.ema_decay}")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Rhythm of a run.

    Attributes:
        log_every: steps between lines of metrics.jsonl.
        save_every_s: seconds between checkpoints, at the next line of the log (one is also written at the end).
        evaluate_every_s: seconds between held-out evaluations, each followed by an export.
        keep: checkpoints kept.
        max_skipped: updates of non-finite loss in a row that stop the run.
        tensorboard: also write TensorBoard files, where tensorboardX is installed.
    """

    log_every: int = 20
    save_every_s: float = 300.0
    evaluate_every_s: float = 300.0
    keep: int = 2
    max_skipped: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if min(self.log_every, self.keep, self.max_skipped) < 1:
            raise ValueError(f"log_every, keep and max_skipped must be at least 1, found {self}")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run but its folder.

    Attributes:
        devices: over which a batch is split, of all processes together; 0: all there are.
    """

    target: str
    data: DataConfig
    drafter: DrafterShape
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    seed: int = 0
    devices: int = 1

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ValueError(f"devices must be 0 (all) or more, found {self.devices}")


def fitted(config: TrainConfig) -> TrainConfig:
    """A configuration whose patterns follow ``drafter.block_size`` and ``drafter.layers``, so that either can be
    changed alone.

    In the patterns of block widths the widest stands for the whole block and none is wider; ``copy_layers`` ends where
    it ended and has as many layers as the drafter. Raises ValueError where there are not so many.
    """
    data, shape, size = config.data, config.drafter, config.drafter.block_size
    copied = shape.copy_layers
    if copied:
        copied = (*range(copied[-1] - shape.layers + 1, copied[-1] + 1 - len(copied)), *copied)[-shape.layers :]
        if copied[0] < 0:
            raise ValueError(
                f"drafter.layers = {shape.layers}: the target has too few layers up to {copied[-1]} to copy"
            )
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data, widths=_to_block(data.widths, size), heldout_widths=_to_block(data.heldout_widths, size)
        ),
        drafter=dataclasses.replace(
            shape, copy_layers=copied, block_widths=tuple(sorted(set(_to_block(shape.block_widths, size))))
        ),
    )


def _to_block(widths: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    return tuple(block_size if w == max(widths) else min(w, block_size) for w in widths)


def drafter_config(shape: DrafterShape, target: DecoderConfig) -> DrafterConfig:
    """The drafter's configuration: backbone layers shaped like the target's last, with the window of ``shape``.

    Raises ValueError for layers that its method or the target's family cannot have or tap, and for layers and tokens
    that the target does not have."""
    if shape.sliding_window and FAMILIES[target.family].two_kinds:
        raise ValueError(
            f"drafter.sliding_window = {shape.sliding_window}: sliding layers of {target.family} have another shape "
            "than its full ones, and its drafters have full ones only; set 0"
        )
    layer = dataclasses.replace(target.layers[-1], window=shape.sliding_window)
    decoder = dataclasses.replace(target, layers=(layer,) * shape.layers, tie_embeddings=False)
    last = target.num_layers - 1
    if shape.method == "mtp" and shape.target_layer_ids != (last,):
        raise ValueError(
            f"drafter.target_layer_ids of an MTP module is the target's last layer, [{last}], found "
            f"{list(shape.target_layer_ids)}"
        )
    if wrong := list(_misfits(shape, target)):
        raise ValueError(f"drafter: {'; '.join(wrong)}")
    block = "dspark" if shape.markov_rank or shape.confidence_head else "dflash"
    return DrafterConfig(
        method=block if shape.method == "dspark" else shape.method,
        decoder=decoder,
        block_size=shape.block_size,
        target_layer_ids=shape.target_layer_ids,
        mask_token_id=shape.mask_token_id,
        num_target_layers=target.num_layers,
        markov_rank=shape.markov_rank,
        markov_head=shape.markov_head,
        confidence_head=shape.confidence_head,
        confidence_with_markov=bool(shape.markov_rank),
        draft_vocab_size=shape.draft_vocab,
        trimmed=bool(shape.draft_vocab),
        block_widths=shape.block_widths,
        logit_softcap=target.logit_softcap,
        norms=shape.norms,
    )


def _misfits(shape: DrafterShape, target: DecoderConfig) -> Iterator[str]:
    """What the target does not have. Unsaid, a layer that is not there may be read as zeros, and a token as the last
    one."""
    last, taps, words = target.num_layers - 1, list(shape.target_layer_ids), target.vocab_size
    if not taps or taps != sorted(set(taps)) or taps[0] < -1 or taps[-1] > last:
        yield f"target_layer_ids must rise from -1 (the embedding) or more to {last} or less, found {taps}"
    if not shape.start_from and any(not 0 <= i <= last for i in shape.copy_layers):
        yield f"copy_layers must lie in 0..{last}, found {list(shape.copy_layers)}"
    if shape.draft_vocab > words:
        yield f"draft_vocab = {shape.draft_vocab}, but the target has {words} tokens"
    for name, tokens in (("mask_token_id", (shape.mask_token_id,)), ("always", shape.always)):
        if max(tokens, default=0) >= words:
            yield f"{name} = {max(tokens)} is beyond the target's {words} tokens"
