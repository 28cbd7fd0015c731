"""Where a drafter begins: the target's last layers, and the text's own statistics.

Copied layers and an identity projection of the last tap reach in minutes what random ones need hours for. The
Markov head begins as the truncated singular value decomposition of the text's shifted log-bigram counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig, LayerConfig
from dspark_jax.data.records import Records
from dspark_jax.drafters.dspark import drafter_specs
from dspark_jax.nn.block import split_projections
from dspark_jax.params import init
from dspark_jax.targets import Target
from dspark_jax.types import PyTree


def draft_vocabulary(records: Records, size: int, vocab_size: int, always: Sequence[int] = ()) -> np.ndarray:
    """``[size]`` int32 target ids in ascending order: the most frequent learnt tokens, and ``always``."""
    counts = np.bincount(records.tokens[np.asarray(records.loss_mask, bool)], minlength=vocab_size).astype(float)
    counts[list(always)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def bigram_counts(records: Records, d2t: np.ndarray, previous: np.ndarray, vocab_size: int) -> np.ndarray:
    """``[len(previous), Vd]`` float32: how often a draft-vocabulary token, being learnt, follows each token."""
    tokens = np.asarray(records.tokens, np.int64)
    learnt = np.asarray(records.loss_mask, bool)
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
    records: Records, d2t: np.ndarray, vocab_size: int, rank: int, *, smoothing: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """W1 ``[V, rank]`` and W2 ``[Vd, rank]`` of a vanilla Markov head that imitates the text's bigrams.

    The matrix is ``log(1 + count / smoothing)``, whose row-wise softmax is the smoothed bigram law; rows are
    weighted by frequency to the power 1/4, so that the rank is spent where text is. Only tokens of the draft
    vocabulary have a row; the others begin at zero.
    """
    counts = bigram_counts(records, d2t, d2t, vocab_size)
    weight = np.maximum(counts.sum(1, keepdims=True), 1.0) ** 0.25
    a, b = truncated_svd(np.log1p(counts / smoothing) * weight, rank, seed)
    w1 = np.zeros((vocab_size, rank), np.float32)
    w1[d2t] = a / weight
    # The two tables begin with entries of equal size.
    ratio = np.sqrt(np.abs(b).mean() / np.abs(w1[d2t]).mean())
    return w1 * ratio, (b / ratio).astype(np.float32)


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
        params["layers"] = jax.tree.map(lambda x: jnp.array(x, jnp.float32), layers)
        taps, d = len(config.target_layer_ids), config.decoder.hidden_size
        params["fc"] = jnp.concatenate([jnp.zeros((d, (taps - 1) * d)), jnp.eye(d)], axis=1)
        params["hidden_norm"] = jnp.array(layers[0]["input_layernorm"], jnp.float32)
        params["norm"] = output_scale * jnp.array(target.params["norm"], jnp.float32)
    if markov is not None:
        params["markov"]["w1"], params["markov"]["w2"] = (jnp.asarray(x, jnp.float32) for x in markov)
    if config.confidence_head:
        params["confidence"] = jax.tree.map(jnp.zeros_like, params["confidence"])
    return params
