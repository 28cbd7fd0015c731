"""The drafters' arithmetic once more, from their definitions: NumPy, float64, whole sequences, no cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.drafters import SharedParams
from dspark_jax.nn.rope import inverse_frequencies


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, position: int, rope: RopeConfig) -> np.ndarray:
    """``[heads, D]`` at one position; halves are the pairs."""
    angle = position * inverse_frequencies(rope, x.shape[-1])[0]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def float64(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def project(decoder: DecoderConfig, layer: LayerConfig, attn: Any, read: np.ndarray, position: int) -> list[np.ndarray]:
    """Query ``[H, D]``, key and value ``[Hk, D]`` of one token."""
    found = []
    for name in "qkv":
        x = (attn[f"{name}_proj"] @ read).reshape(-1, layer.head_dim)
        if name != "v":
            x = _rms(x, attn[f"{name}_norm"], decoder.rms_norm_eps) if decoder.qk_norm else x
            x = _rotate(x, position, layer.rope)
        found.append(x)
    return found


def finish(
    decoder: DecoderConfig, params: Any, residual: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """The layer's output ``[d]`` for one query ``[H, D]`` that sees the keys and values ``[n, Hk, D]``, all of them."""
    group, heads = len(q) // k.shape[1], []
    for h, query in enumerate(q):
        scores = k[:, h // group] @ query * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        heads.append(weights @ v[:, h // group] / weights.sum())
    x = residual + params["attn"]["o_proj"] @ np.concatenate(heads)
    normed, mlp = _rms(x, params["post_attention_layernorm"], decoder.rms_norm_eps), params["mlp"]
    return x + mlp["down_proj"] @ (_silu(mlp["gate_proj"] @ normed) * (mlp["up_proj"] @ normed))


class ChainReference:
    """``steps(features [n, m * d], tokens [n + 1], k)``: greedy drafts behind the last token, from the definition.

    Pair c is (state of position c - 1, token c), at rotary position c - 1; it attends to pairs 1..c, within the
    window.
    """

    def __init__(self, config: DrafterConfig, params: Any, shared: SharedParams) -> None:
        self.config, self.norms, self.eps = config, config.norms, config.decoder.rms_norm_eps
        self.p, self.embed, self.head = (float64(tree) for tree in (params, shared.embed, shared.head))
        self.ids = np.arange(len(self.head)) if shared.d2t is None else np.asarray(shared.d2t)

    def condense(self, features: np.ndarray) -> np.ndarray:
        if self.config.method == "mtp":
            return features
        if self.norms.before_fc:
            features = _rms(features, self.p["input_norm"], self.eps)
        if self.norms.each_feature:
            parts = np.split(features, len(self.p["fc_norm"]), axis=-1)
            features = np.concatenate([_rms(x, w, self.eps) for x, w in zip(parts, self.p["fc_norm"], strict=True)], -1)
        return features @ self.p["fc"].T

    def join(self, hidden: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        layer, e = self.p["layers"][0], self.embed[token]
        if self.config.method == "mtp":
            pair = [_rms(hidden, self.p["hidden_norm"], self.eps), _rms(e, self.p["embed_norm"], self.eps)]
            x = self.p["fc"] @ np.concatenate(pair)
            return x, _rms(x, layer["input_layernorm"], self.eps)
        normed = _rms(hidden, layer["hidden_norm"], self.eps)
        read = np.concatenate([_rms(e, layer["input_layernorm"], self.eps), normed])
        return (normed if self.norms.before_residual else hidden), read

    def steps(self, features: np.ndarray, tokens: Any, k: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(logits ``[k, Vd]``, states before the last norm ``[k, d]``, target ids)."""
        decoder, layer, params = self.config.decoder, self.config.decoder.layers[0], self.p["layers"][0]
        hidden, tokens = self.condense(np.asarray(features, np.float64)), [int(t) for t in tokens]
        keys: list[np.ndarray] = []
        values: list[np.ndarray] = []
        logits: list[np.ndarray] = []
        states: list[np.ndarray] = []
        for c in range(1, len(hidden) + k):
            if c <= len(hidden):
                before = hidden[c - 1]
            residual, read = self.join(before, tokens[c])
            q, key, value = project(decoder, layer, params["attn"], read, c - 1)
            keys, values = [*keys, key], [*values, value]
            if c < len(hidden):
                continue
            seen = slice(-layer.window if layer.window else None, None)
            out = finish(decoder, params, residual, q, np.stack(keys[seen]), np.stack(values[seen]))
            normed = _rms(out, self.p["norm"], self.eps)
            states, logits = [*states, out], [*logits, self.head @ normed]
            tokens.append(int(self.ids[int(np.argmax(logits[-1]))]))
            before = normed if self.norms.output else out
        return np.stack(logits), np.stack(states), tokens[-k:]


def block_states(
    config: DrafterConfig, params: Any, embed: Any, features: np.ndarray, anchor: int, width: int
) -> np.ndarray:
    """States ``[width, d]`` of a DFlash block behind a context of ``features [n, m * d]``, after the last norm.

    A slot sees the context before the anchor and the whole block; in a windowed layer only keys at positions
    p > own position - window.
    """
    decoder, eps = config.decoder, config.decoder.rms_norm_eps
    params, embed, n = float64(params), float64(embed), len(features)
    context = _rms(float64(features) @ params["fc"].T, params["hidden_norm"], eps)
    x = embed[[anchor] + [config.mask_token_id] * (width - 1)]
    for layer, p in zip(decoder.layers, params["layers"], strict=True):
        queries: list[np.ndarray] = []
        pairs = [project(decoder, layer, p["attn"], c, i)[1:] for i, c in enumerate(context)]
        for i, row in enumerate(x):
            q, k, v = project(decoder, layer, p["attn"], _rms(row, p["input_layernorm"], eps), n + i)
            queries, pairs = [*queries, q], [*pairs, [k, v]]
        rows = []
        for i, q in enumerate(queries):
            first = max(n + i - layer.window + 1, 0) if layer.window else 0
            keys, values = (np.stack(a) for a in zip(*pairs[first:], strict=True))
            rows.append(finish(decoder, p, x[i], q, keys, values))
        x = np.stack(rows)
    return _rms(x, params["norm"], eps)
