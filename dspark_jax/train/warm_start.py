"""Where a drafter begins: an earlier drafter, or the target's last layers and the text's own statistics.

Copied layers and an identity projection of the last tap reach in minutes what random ones need hours for. The
Markov head begins as a low-rank fit of the text's bigrams.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dspark_jax.checkpoint.drafter_files import read_config, read_drafter
from dspark_jax.config import DrafterConfig, LayerConfig
from dspark_jax.data.records import Records
from dspark_jax.drafters import drafter_specs
from dspark_jax.load import find_drafter, target_view
from dspark_jax.nn.block import split_projections
from dspark_jax.params import init
from dspark_jax.targets import Target
from dspark_jax.train.step import make_bigram_step
from dspark_jax.types import PyTree

LOG = logging.getLogger("dspark_jax.train")


def draft_vocabulary(records: Records, size: int, vocab_limit: int, always: Sequence[int] = ()) -> np.ndarray:
    """``[size]`` int32 target ids in ascending order: the most frequent learnt tokens, and ``always``; all below
    ``vocab_limit``, since what lies beyond is never drafted. Raises ValueError where there are not so many, or a token
    of ``always`` lies beyond."""
    if beyond := [token for token in always if token >= vocab_limit]:
        raise ValueError(f"drafter.always: {beyond} are beyond the {vocab_limit} tokens that can be drafted")
    if size > vocab_limit:
        raise ValueError(f"drafter.draft_vocab = {size}, but only {vocab_limit} tokens can be drafted")
    learnt = records.tokens[np.asarray(records.loss_mask, bool)]
    counts = np.bincount(learnt, minlength=vocab_limit)[:vocab_limit].astype(float)
    counts[list(always)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


class Text(NamedTuple):
    """Tokens in a row, as ``Records`` has all of its own."""

    tokens: np.ndarray  # [N]
    loss_mask: np.ndarray  # [N]


def joined(records: Records, ids: np.ndarray, length: int) -> Text:
    """The records ``ids``, cut to ``length`` tokens, one behind the other; no token follows one of another record."""
    batch = records.batch(ids, length)
    learnt = batch.loss_mask.copy()
    learnt[:, 0] = False
    return Text(batch.tokens.reshape(-1), learnt.reshape(-1))


def bigram_counts(text: Records | Text, d2t: np.ndarray, previous: np.ndarray, vocab_size: int) -> np.ndarray:
    """``[len(previous), Vd]`` float32: how often a draft-vocabulary token, being learnt, follows each token."""
    tokens = np.asarray(text.tokens, np.int64)
    learnt = np.asarray(text.loss_mask, bool)
    row = np.full(vocab_size, -1)
    row[previous] = np.arange(len(previous))
    column = np.full(vocab_size, -1)
    column[d2t] = np.arange(len(d2t))
    a, b = row[tokens[:-1]], column[tokens[1:]]
    good = learnt[1:] & (a >= 0) & (b >= 0)
    flat = a[good] * len(d2t) + b[good]
    return np.bincount(flat, minlength=len(previous) * len(d2t)).reshape(len(previous), -1).astype(np.float32)


def truncated_svd(matrix: np.ndarray, rank: int, seed: int, rounds: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Factors ``a [M, rank]``, ``b [N, rank]`` with ``a b^T`` near ``matrix`` (randomised range finder)."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(matrix @ rng.standard_normal((matrix.shape[1], rank + 16), np.float32))[0]
    for _ in range(rounds):
        basis = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ basis)[0])[0]
    u, s, vt = np.linalg.svd(basis.T @ matrix, full_matrices=False)
    root = np.sqrt(s[:rank])
    return (basis @ u[:, :rank]) * root, vt[:rank].T * root


def bigram_factors(
    text: Records | Text,
    d2t: np.ndarray,
    vocab_size: int,
    rank: int,
    *,
    steps: int = 600,
    prior: float = 5.0,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """W1 ``[V, rank]`` and W2 ``[Vd, rank]`` of a vanilla Markov head that imitates the text's bigrams.

    The bigram law is smoothed with ``prior`` counts of the unigram law. The decomposition of its centred logarithm
    is only a beginning (acceptance 0.14 where the law itself has 0.18): a least-squares fit spends its rank on
    pairs that never occur. ``steps`` of gradient descent on the cross entropy recover most of the rest in a minute.
    Only tokens of the draft vocabulary have a row; the others begin at zero.
    """
    counts = bigram_counts(text, d2t, d2t, vocab_size)
    unigram = counts.sum(0) + 0.5
    unigram *= prior / unigram.sum()
    total = counts.sum(1)
    centred = np.log(counts + unigram)
    centred -= centred.mean(1, keepdims=True)
    weight = np.sqrt(np.maximum(total, 1.0))[:, None]
    centred *= weight
    a, b = truncated_svd(centred, rank, seed, rounds=1)
    del centred
    a /= weight
    balance = np.sqrt(np.abs(b).mean() / np.abs(a).mean())
    tables = (jnp.asarray(a * balance), jnp.asarray(b / balance))
    rule = optax.adam(optax.linear_schedule(1e-2, 0.0, steps))
    state, step = rule.init(tables), make_bigram_step(rule)
    drawn = np.maximum(total, 3.0) ** 0.75
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = rng.choice(len(total), min(256, len(total)), p=drawn / drawn.sum(), replace=False)
        law = (counts[rows] + unigram) / (total[rows] + prior)[:, None]
        tables, state = step(tables, state, rows, law)
    w1 = np.zeros((vocab_size, rank), np.float32)
    w1[d2t] = tables[0]
    return w1, np.asarray(tables[1])


def _shape(layer: LayerConfig) -> tuple[int, int, bool]:
    return layer.num_kv_heads, layer.head_dim, layer.k_eq_v


def initial_params(
    target: Target,
    config: DrafterConfig,
    key: Any,
    *,
    copy_layers: Sequence[int] = (),
    output_scale: float = 1.0,
    markov: tuple[np.ndarray, np.ndarray] | None = None,
) -> PyTree:
    """A drafter's parameters in float32.

    Args:
        copy_layers: target layers to copy into the drafter's, one each; empty: random layers. The projection then
            passes the last tap on, and the norms are the target's.
        output_scale: factor of the final norm, below 1 where the Markov head already knows something.
        markov: W1 and W2.
    """
    params = init(drafter_specs(config), key, jnp.float32)
    if copy_layers:
        if target.stacked or len(copy_layers) != config.decoder.num_layers:
            raise ValueError(f"copy_layers needs {config.decoder.num_layers} layers of an unrolled target")
        shapes = [_shape(layer) for layer in config.decoder.layers]
        other = [i for i, shape in zip(copy_layers, shapes, strict=True) if _shape(target.config.layers[i]) != shape]
        if other:
            raise ValueError(f"copy_layers: layers {other} of the target have not the shape of the drafter's")
        layers = [
            split_projections(target.config, target.config.layers[i], target.params["layers"][i]) for i in copy_layers
        ]
        layers = jax.tree.map(lambda x: jnp.array(x, jnp.float32), layers)
        _copy_layers(params, config, layers, target.params["norm"] * output_scale)
    if markov is not None:
        params["markov"]["w1"], params["markov"]["w2"] = (jnp.asarray(x, jnp.float32) for x in markov)
    if config.confidence_head:
        params["confidence"] = jax.tree.map(jnp.zeros_like, params["confidence"])
    return params


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A drafter that a run begins with."""

    params: PyTree  # float32, as ``initial_params``
    d2t: np.ndarray | None  # [Vd] int32, None where the draft vocabulary is whole
    positions: int  # trained on; 0 where the checkpoint does not say
    training: Mapping[str, Any]  # what the checkpoint says of its training


def earlier_drafter(name: str, wanted: DrafterConfig, target: Target) -> Earlier:
    """The drafter ``name`` (shipped, a folder, a hub id in the local cache) as the beginning of a run of ``wanted``.

    Raises FileNotFoundError where there is none, ValueError where it is of another shape, listing what differs.
    """
    place = find_drafter(name)
    pieces = read_drafter(place, drafter_specs, target=target_view(target), dtype=np.dtype(np.float32))
    mine, its = (_must_agree(config) for config in (wanted, pieces.config))
    wrong = [f"{key}: {its[key]!r}, the run has {mine[key]!r}" for key in mine if its[key] != mine[key]]
    if wrong:
        raise ValueError(f"drafter.start_from: {place} is a drafter of another shape: {'; '.join(wrong)}")
    if pieces.own:
        LOG.warning(
            "drafter.start_from: %s has its own %s, which the run does not take over: it begins with the target's",
            place,
            " and ".join(sorted(pieces.own)),
        )
    seen = read_config(place).get("training")
    training = seen if isinstance(seen, dict) else {}  # anybody may have written something there
    positions = training.get("positions")
    return Earlier(
        jax.tree.map(lambda x: jnp.array(x, jnp.float32), pieces.params),
        None if pieces.d2t is None else np.asarray(pieces.d2t, np.int32),
        positions if isinstance(positions, int) else 0,
        training,
    )


def _must_agree(config: DrafterConfig) -> dict[str, Any]:
    """What makes a drafter's parameters mean the same."""
    names = "method target_layer_ids mask_token_id markov_rank markov_head confidence_head confidence_with_markov"
    names += " draft_vocab_size norms"
    found: dict[str, Any] = {name: getattr(config, name) for name in names.split()}
    found["sliding_window"] = [layer.window for layer in config.decoder.layers]
    found["layers"] = [dataclasses.replace(layer, window=0) for layer in config.decoder.layers]
    return found | {name: getattr(config.decoder, name) for name in ("hidden_size", "vocab_size")}


def _copy_layers(params: PyTree, config: DrafterConfig, layers: list[PyTree], norm: Any) -> None:
    """Fills in what a drafter takes from its target's layers, and the projection that passes the last tap on."""
    taps, d = len(config.target_layer_ids), config.decoder.hidden_size
    params["norm"] = jnp.array(norm, jnp.float32)
    if config.method == "mtp":
        params["fc"], params["layers"] = jnp.concatenate([jnp.eye(d), jnp.eye(d)], axis=1) / 2, layers  # the mean
        return
    params["fc"] = jnp.concatenate([jnp.zeros((d, (taps - 1) * d)), jnp.eye(d)], axis=1)
    if config.method == "eagle3":
        _copy_beside_embedding(params["layers"][0], layers[0])
    else:
        params["layers"] = layers
        params["hidden_norm"] = jnp.array(layers[0]["input_layernorm"])  # its own buffer: the state is donated


def _copy_beside_embedding(layer: PyTree, copied: PyTree) -> None:
    """EAGLE-3's attention reads [embedding; hidden state]: the copied projections are those of the hidden half, whose
    norm is the copied one. The embedding's half stays as it was drawn."""
    d = copied["attn"]["o_proj"].shape[0]
    for name, value in copied["attn"].items():
        wide = name in ("q_proj", "k_proj", "v_proj")
        layer["attn"][name] = jnp.concatenate([layer["attn"][name][:, :d], value], axis=1) if wide else value
    layer["hidden_norm"] = copied["input_layernorm"]
    for name in copied.keys() - {"attn", "input_layernorm"}:
        layer[name] = copied[name]
