"""What this code computes for a case of the reference implementation, under the reference's own keys.

A case directory holds ``case.json`` (target, drafter, limits), a target, a drafter, and a file of expected arrays of
which only the inputs are read here: prompts, stop tokens, thresholds, teacher-forced sequences, anchors, and of a
training batch its text, masks and anchors and which gradients are asked for. Every entry of ``SECTIONS`` adds arrays.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import Sampling
from dspark_jax.drafters import Drafter
from dspark_jax.drafters.dflash import base_logits
from dspark_jax.evaluate.chain_rounds import ChainRounds
from dspark_jax.evaluate.rounds import CELLS, Arrays, Models, Rounds, softmax
from dspark_jax.evaluate.training_step import GRADIENT, TRAINING_INPUTS, loss_settings, training_arrays
from dspark_jax.generate import GenerateOutput, generate
from dspark_jax.heads.confidence import confidence_logits
from dspark_jax.heads.markov import markov_bias, teacher_forced
from dspark_jax.load import load_drafter, load_target
from dspark_jax.train.config import LossConfig
from dspark_jax.types import EMPTY

FAMILIES, DRAFTERS = ("qwen3", "llama", "gemma4"), ("dspark", "dflash", "eagle3")
"""What a case's kind may begin and end with."""

STORED_ROUNDS = 3
GREEDY = Sampling(temperature=0.0)


class UnsupportedCase(ValueError):
    """The case is of a kind that this version does not compute."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A loaded case: models, limits and inputs."""

    models: Models
    inputs: Mapping[str, np.ndarray]
    prompts: int
    max_new_tokens: int
    threshold: float | None
    loss: LossConfig

    def prompt(self, i: int) -> np.ndarray:
        """Token ids ``[n]`` of prompt i."""
        return np.asarray(self.inputs[f"p{i}.prompt_ids"], np.int32)


def load_case(directory: str | Path, dtype: str = "float32") -> Case:
    """Loads the models and inputs of a case.

    Raises:
        UnsupportedCase: naming the kind.
        FileNotFoundError, ValueError: a file that is missing or wrong.
    """
    folder = Path(directory)
    spec = json.loads((folder / "case.json").read_text())
    kind = str(spec.get("kind", ""))
    if not kind.startswith(FAMILIES) or not kind.endswith(DRAFTERS):
        raise UnsupportedCase(
            f"{folder}: cases of kind {kind!r} are not computed by this version, which knows targets "
            f"{', '.join(FAMILIES)} with drafters {', '.join(DRAFTERS)}"
        )
    target = load_target(folder / spec["target"], dtype=dtype)
    drafter: Any = load_drafter(folder / spec["draft"], target, dtype=dtype)
    with np.load(folder / spec["expected"]) as arrays:
        given = {name: arrays[name] for name in arrays.files if _is_input(name)}
        given["train.grads"] = np.asarray([name for name in arrays.files if name.startswith(GRADIENT)])
    return Case(
        models=Models(target, drafter),
        inputs=given,
        prompts=int(spec["num_prompts"]),
        max_new_tokens=int(spec["max_new_tokens"]),
        threshold=spec.get("confidence_threshold"),
        loss=loss_settings(spec),
    )


def _is_input(name: str) -> bool:
    if name.startswith("train."):
        return name.removeprefix("train.") in TRAINING_INPUTS
    return name.endswith((".prompt_ids", "stop.token", "stop2.token")) or name in ("tf.input_ids", "tf.anchors")


def compute(case: Case) -> dict[str, np.ndarray]:
    """All arrays of a case."""
    out: dict[str, np.ndarray] = {}
    for section in SECTIONS:
        out |= section(case)
    return out


# ---- sections ------------------------------------------------------------------------------------------------


def prompt_arrays(case: Case) -> Arrays:
    """Target logits, tapped features and final states at every prompt position."""
    out: Arrays = {}
    for i in range(case.prompts):
        hidden, features, logits = case.models.prefill(case.prompt(i))
        out |= {
            f"p{i}.prompt_ids": case.prompt(i),
            f"p{i}.target_logits": logits,
            f"p{i}.target_features": features,
            f"p{i}.target_last_hidden": hidden,
        }
    return out


def generations(case: Case) -> Arrays:
    """Greedy generations through ``generate()``: free, plain, with a stop token, with a confidence threshold."""
    out: Arrays = {}
    for i in range(case.prompts):
        run = _generate(case, i)
        plain = _generate(case, i, drafter=None)
        ids = _tokens(run)
        out |= {
            f"p{i}.gen.output_ids": ids,
            f"p{i}.gen.target_greedy_ids": _tokens(plain),
            f"p{i}.gen.target_margins": _margins(case, i, ids),
            **_lengths(f"p{i}.gen", run, len(case.prompt(i))),
        }
        for name in ("stop", "stop2"):
            token = case.inputs.get(f"p{i}.{name}.token")
            if token is not None:
                stopped = _generate(case, i, stop_token_ids=(int(token),))
                out |= {f"p{i}.{name}.token": token, f"p{i}.{name}.output_ids": _tokens(stopped)}
                out |= _lengths(f"p{i}.{name}", stopped, None)
        if case.threshold is not None and case.models.drafter.has_confidence:
            cut = _generate(case, i, admit="threshold", confidence_threshold=float(case.threshold))
            out |= {f"p{i}.thr.threshold": np.asarray(case.threshold, np.float32), f"p{i}.thr.output_ids": _tokens(cut)}
            out |= _lengths(f"p{i}.thr", cut, None)
    return out


def rounds(case: Case) -> Arrays:
    """The first rounds in full, and the smallest margin of a greedy draft over all rounds."""
    out: Arrays = {}
    for i in range(case.prompts):
        margin = np.inf
        limit = len(case.prompt(i)) + case.max_new_tokens
        kind = ChainRounds if case.models.drafter.config.chain else Rounds
        walk = kind(case.models, case.prompt(i), limit + case.models.drafter.block_size + 1)
        for j in range(case.max_new_tokens):
            if walk.start >= limit:  # the reference's own end: it may run one round more than generate()
                break
            step = walk.next()
            best = np.sort(step.draft_logits, axis=-1)
            margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
            if j < STORED_ROUNDS:
                found = step.arrays(case.models, with_cache=(i, j) == (1, 2))
                out |= {f"p{i}.r{j}.{name}": value for name, value in found.items()}
        out[f"p{i}.gen.min_draft_margin"] = np.asarray(margin, np.float32)
    return out


def teacher_forced_blocks(case: Case) -> Arrays:
    """Acceptance of blocks whose previous tokens are a given sequence's own."""
    if "tf.input_ids" not in case.inputs or "tf.anchors" not in case.inputs:
        return {}
    ids = np.asarray(case.inputs["tf.input_ids"], np.int32)
    anchors = np.asarray(case.inputs["tf.anchors"], np.int32)
    models, drafter = case.models, case.models.drafter
    k = drafter.block_size
    _, _, target_logits = models.prefill(ids)
    state = models.context(ids)
    draft: list[np.ndarray] = []
    confidence: list[np.ndarray] = []
    for a in anchors:
        logits, scores = _teacher_forced(drafter, state, jnp.asarray([a], jnp.int32), jnp.asarray(ids[None, a : a + k]))
        draft.append(models.to_target_ids(np.asarray(logits[0])))
        if scores is not None:
            confidence.append(np.asarray(scores[0]))
    rows = np.stack([target_logits[a : a + k] for a in anchors])
    labels = np.stack([ids[a + 1 : a + k + 1] for a in anchors])
    stacked = np.stack(draft)
    p, q = softmax(rows), softmax(stacked)
    out = {
        "tf.input_ids": ids,
        "tf.anchors": anchors,
        "tf.accept_rate_t1": np.minimum(p, q).sum(-1),
        "tf.accept_rate_t06": np.minimum(softmax(rows / 0.6), softmax(stacked / 0.6)).sum(-1),
        "tf.draft_prob_of_label_t1": np.take_along_axis(q, labels[..., None], -1)[..., 0],
        "tf.target_prob_of_label_t1": np.take_along_axis(p, labels[..., None], -1)[..., 0],
    }
    if confidence:
        out["tf.confidence_logits"] = np.stack(confidence)
    return out


def training_step(case: Case) -> Arrays:
    """One training step: states, masks, loss terms and gradients."""
    return training_arrays(case.models, case.loss, case.inputs)


SECTIONS: list[Callable[[Case], Arrays]] = [prompt_arrays, generations, rounds, teacher_forced_blocks, training_step]


# ---- their parts ---------------------------------------------------------------------------------------------


def _generate(case: Case, i: int, drafter: Any = ..., **options: Any) -> GenerateOutput:
    prompt = case.prompt(i)
    padded = np.zeros((1, -(-max(map(len, map(case.prompt, range(case.prompts)))) // CELLS) * CELLS), np.int32)
    padded[0, : len(prompt)] = prompt  # one width for all prompts: one program
    return generate(
        case.models.target,
        case.models.drafter if drafter is ... else drafter,
        jnp.asarray(padded),
        jnp.asarray([len(prompt)]),
        seeds=jnp.zeros(1, jnp.uint32),
        max_new_tokens=case.max_new_tokens,
        sampling=GREEDY,
        **options,
    )


def _tokens(run: GenerateOutput) -> np.ndarray:
    ids = np.asarray(run.tokens[0])
    return ids[ids != EMPTY]


def _lengths(prefix: str, run: GenerateOutput, start: int | None) -> Arrays:
    """The three lists of a run; ``start``: the prompt's length, to add ``round_starts``."""
    cycles = int((np.asarray(run.committed[0]) > 0).sum())
    committed = np.asarray(run.committed[0])[:cycles]
    out = {
        f"{prefix}.acceptance_lengths": committed,
        f"{prefix}.accepted_draft_lengths": np.asarray(run.accepted[0])[:cycles],
        f"{prefix}.proposal_lengths": np.asarray(run.offered[0])[:cycles],
    }
    if start is not None:
        out[f"{prefix}.round_starts"] = start + np.concatenate([[0], np.cumsum(committed)[:-1]]).astype(np.int32)
    return out


def _margins(case: Case, i: int, ids: np.ndarray) -> np.ndarray:
    """Best minus second-best target logit at every new token."""
    prompt = case.prompt(i)
    _, _, logits = case.models.prefill(np.concatenate([prompt, ids[:-1]]))
    best = np.sort(logits[len(prompt) - 1 :], axis=-1)
    return best[:, -1] - best[:, -2]


@jax.jit
def _teacher_forced(
    drafter: Drafter, state: Any, length: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Corrected logits ``[1, K, Vd]`` and confidence logits ``[1, K]`` of the block whose anchor sits at ``length``.

    ``previous [1, K]``: the anchor and the tokens behind it, the last one left out.
    """
    config, params = drafter.config, drafter.params
    hidden = drafter.hidden(state, previous[:, 0], length, previous.shape[1])
    logits, e = base_logits(config, drafter.shared, hidden), None
    if config.markov_rank:
        z, e = teacher_forced(config, params["markov"], previous, hidden)
        logits = logits + markov_bias(params["markov"], z)
    if not config.confidence_head:
        return logits, None
    return logits, confidence_logits(config, params["confidence"], hidden, e)
