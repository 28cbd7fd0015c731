"""An independent DSpark in NumPy, float64, one text at a time: written from the conventions of oracle/README.

Nothing of dspark_jax is used. Weights are a dict of checkpoint names; the configuration is the checkpoint's own JSON.
No caches, no batching, no padding: every call recomputes everything from the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: np.ndarray, position: np.ndarray, theta: float) -> np.ndarray:
    """``x [T, heads, D]`` at absolute positions ``[T]``; pairs are (i, i + D/2)."""
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Layer:
    """One Qwen3 decoder layer of a target or a drafter."""

    def __init__(self, weights: Weights, prefix: str, config: Mapping[str, Any]) -> None:
        self.weights, self.prefix = weights, prefix
        self.eps, self.size = config["rms_norm_eps"], config["head_dim"]
        self.theta = config["rope_parameters"]["rope_theta"]

    def w(self, name: str) -> np.ndarray:
        return self.weights[f"{self.prefix}{name}.weight"]

    def heads(self, x: np.ndarray, name: str) -> np.ndarray:
        return (x @ self.w(f"self_attn.{name}_proj").T).reshape(len(x), -1, self.size)

    def keys_values(self, x: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k = rms_norm(self.heads(x, "k"), self.w("self_attn.k_norm"), self.eps)
        return rotate(k, position, self.theta), self.heads(x, "v")

    def forward(
        self,
        x: np.ndarray,
        position: np.ndarray,
        before: tuple[np.ndarray, np.ndarray] | None,
        causal: bool,
    ) -> np.ndarray:
        """``before``: keys and values in front of the tokens' own, all of them visible."""
        h = rms_norm(x, self.w("input_layernorm"), self.eps)
        q = rotate(rms_norm(self.heads(h, "q"), self.w("self_attn.q_norm"), self.eps), position, self.theta)
        k, v = self.keys_values(h, position)
        context = 0
        if before is not None:
            context = len(before[0])
            k, v = np.concatenate([before[0], k]), np.concatenate([before[1], v])
        group = q.shape[1] // k.shape[1]
        out = np.zeros_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(self.size)
            if causal:
                scores = np.where(np.tri(len(x), len(k), context, dtype=bool), scores, -np.inf)
            out[:, head] = softmax(scores) @ v[:, head // group]
        x = x + out.reshape(len(x), -1) @ self.w("self_attn.o_proj").T
        h = rms_norm(x, self.w("post_attention_layernorm"), self.eps)
        gate, up = h @ self.w("mlp.gate_proj").T, h @ self.w("mlp.up_proj").T
        return x + (gate * sigmoid(gate) * up) @ self.w("mlp.down_proj").T


class Target:
    """A Qwen3 target."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.layers = [Layer(weights, f"model.layers.{i}.", config) for i in range(config["num_hidden_layers"])]

    def __call__(self, ids: np.ndarray, layer_ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Final normed states ``[n, d]``, features ``[n, m * d]``, logits ``[n, V]`` of a text from position 0."""
        x = self.weights["model.embed_tokens.weight"][ids]
        states = {-1: x}
        for i, layer in enumerate(self.layers):
            x = states[i] = layer.forward(x, np.arange(len(ids)), None, causal=True)
        last = rms_norm(x, self.weights["model.norm.weight"], self.config["rms_norm_eps"])
        tied = self.config["tie_word_embeddings"]
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return last, np.concatenate([states[i] for i in layer_ids], axis=-1), last @ head.T


class Drafter:
    """A DSpark or DFlash drafter, anchor-first layout."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.k, self.eps = config["block_size"], config["rms_norm_eps"]
        self.layers = [Layer(weights, f"layers.{i}.", config) for i in range(config["num_hidden_layers"])]

    def w(self, name: str) -> np.ndarray:
        return self.weights[name]

    def context(self, features: np.ndarray) -> np.ndarray:
        return rms_norm(features @ self.w("fc.weight").T, self.w("hidden_norm.weight"), self.eps)

    def cache(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[layers, Hk, n, D]`` of the context."""
        ctx, position = self.context(features), np.arange(len(features))
        pairs = [layer.keys_values(ctx, position) for layer in self.layers]
        keys, values = (np.stack([pair[i].swapaxes(0, 1) for pair in pairs]) for i in range(2))
        return keys, values

    def block(self, features: np.ndarray, anchor: int, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Hidden states ``[K, d]`` and base logits ``[K, V]``; the context is all positions before the anchor's.

        ``shift`` moves the block's rotary positions: a known mistake, to see that it would show."""
        ctx, start = self.context(features), len(features)
        ids = np.array([anchor, *[self.config["mask_token_id"]] * (self.k - 1)])
        x, position = self.w("embed_tokens.weight")[ids], start + shift + np.arange(self.k)
        for layer in self.layers:
            x = layer.forward(x, position, layer.keys_values(ctx, np.arange(start)), causal=False)
        hidden = rms_norm(x, self.w("norm.weight"), self.eps)
        return hidden, hidden @ self.w("lm_head.weight").T

    def bias(self, h: np.ndarray, e: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Markov bias ``[V]`` and the new recurrent state."""
        kind, w2 = self.config["markov_head_type"], self.w("markov_head.markov_w2.weight")
        if kind == "vanilla":
            return w2 @ e, state
        name = "gate_proj" if kind == "gated" else "joint_proj"
        weight, bias = self.w(f"markov_head.{name}.weight"), self.w(f"markov_head.{name}.bias")
        if kind == "gated":
            return w2 @ (sigmoid(weight @ np.concatenate([h, e]) + bias) * e), state
        gate, candidate, output = np.split(weight @ np.concatenate([state, e, h]) + bias, 3)
        new = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        return w2 @ np.tanh(output), new

    def draft(
        self, features: np.ndarray, anchor: int, given: np.ndarray | None = None, shift: int = 0
    ) -> dict[str, np.ndarray]:
        """One block; greedy, or along ``given [K]``, the tokens that follow the anchor."""
        hidden, base = self.block(features, anchor, shift)
        corrected, tokens, confidence = [], [], []
        previous, state = anchor, np.zeros(self.config["markov_rank"])
        for k in range(self.k):
            logits, e = base[k], None
            if self.config["markov_rank"]:
                e = self.w("markov_head.markov_w1.weight")[previous]
                bias, state = self.bias(hidden[k], e, state)
                logits = logits + bias
            if self.config["enable_confidence_head"]:
                with_e = self.config["confidence_head_with_markov"] and e is not None
                x = np.concatenate([hidden[k], e]) if with_e else hidden[k]  # type: ignore[list-item]
                weight, shift = (self.w(f"confidence_head.proj.{n}") for n in ("weight", "bias"))
                confidence.append(float((weight @ x + shift)[0]))
            corrected.append(logits)
            tokens.append(int(np.argmax(logits)))
            previous = tokens[-1] if given is None else int(given[k])
        out = {
            "block_hidden": hidden,
            "base_logits": base,
            "corrected_logits": np.stack(corrected),
            "draft_tokens": np.array(tokens),
        }
        if confidence:
            out["confidence_logits"] = np.array(confidence)
        return out
