"""A training run as data; read from TOML by ``config_toml.load_toml``. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax.config import DecoderConfig, DrafterConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the text is and how it is cut.

    Attributes:
        train, heldout: folders of ``data/records.py``.
        length: tokens of a sequence (longer records are cut).
        least_learnt: records with fewer learnt tokens are passed over.
        batch: sequences a step.
        anchors: blocks a sequence.
        rounds: optimiser updates a step; each takes its share of every sequence's anchors, so that one pass of the
            target serves many small updates.
        widths: pattern of block widths over a sequence's anchors.
        teacher_cache: folder of ``scripts/cache_teacher.py`` to read the target's states of the training text from;
            none: the target runs. Held-out text is always read by the target itself.
        heldout_batches: batches of an evaluation.
        heldout_anchors, heldout_widths: blocks measured a sequence, and the pattern of their widths.
    """

    train: Path
    heldout: Path
    length: int = 384
    least_learnt: int = 2
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


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """The drafter to train; what is not said here is the target's.

    Attributes:
        layers: draft layers, shaped like the target's.
        copy_layers: target layers they begin as; empty: random.
        output_scale: factor of the final norm at the beginning (``warm_start.initial_params``).
        bigram_start: the Markov head begins with the text's bigrams.
        draft_vocab: tokens of the draft vocabulary, 0 for the whole one.
        always: token ids that belong to it whatever their count.
        block_widths: widths listed in the checkpoint as trained.
    """

    layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 7
    block_widths: tuple[int, ...] = ()
    copy_layers: tuple[int, ...] = ()
    output_scale: float = 1.0
    markov_rank: int = 0
    markov_head: str = "vanilla"
    bigram_start: bool = False
    confidence_head: bool = True
    draft_vocab: int = 0
    always: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of cross entropy, L1 and confidence (equation 12), and the decay over positions (equation 8).

    Attributes:
        chunks: equal parts of the anchors whose logits are made, compared and thrown away one after the other; for
            large vocabularies. 0: all at once, the target's probabilities made once a step (faster where they fit).
    """

    weights: tuple[float, ...] = (0.1, 0.9, 1.0)
    decay: float = 4.0
    chunks: int = 0

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


def drafter_config(shape: DrafterShape, target: DecoderConfig) -> DrafterConfig:
    """The drafter's configuration: backbone layers as wide as the target's, full attention like its last layer."""
    layer = target.layers[-1]
    decoder = dataclasses.replace(target, layers=(layer,) * shape.layers, tie_embeddings=False)
    return DrafterConfig(
        method="dspark" if shape.markov_rank or shape.confidence_head else "dflash",
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
    )
