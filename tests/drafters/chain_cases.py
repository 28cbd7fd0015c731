"""Tiny chains that get a part of their drafts accepted, and the loop that decodes with blocks of every length."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import cycle
from dspark_jax.config import DrafterConfig, Eagle3Norms, Sampling
from dspark_jax.drafters import KINDS, LoadedDrafter
from dspark_jax.params import init
from dspark_jax.targets import Target
from dspark_jax.testing import open_slots
from dspark_jax.types import Array


def tiny_config(
    target: Target, method: str, *, window: int = 0, trimmed: int = 0, taps: tuple[int, ...] = (), **changes: Any
) -> DrafterConfig:
    """A chain for a tiny target: EAGLE-3 taps all layers but the last unless told otherwise, MTP the last."""
    decoder, layers = target.config, target.config.num_layers
    layer = dataclasses.replace(decoder.layers[0], window=window)
    return DrafterConfig(
        method=method,
        decoder=dataclasses.replace(decoder, layers=(layer,), tie_embeddings=False),
        block_size=4 if method == "eagle3" else 1,
        target_layer_ids=taps or (tuple(range(layers - 1)) if method == "eagle3" else (layers - 1,)),
        num_target_layers=layers,
        draft_vocab_size=trimmed,
        trimmed=trimmed > 0,
        confidence_with_markov=False,
        **changes,
    )


class Tiny(NamedTuple):
    """A chain, and its parameters before q, k, v were put together."""

    drafter: LoadedDrafter
    params: Any


def tiny_chain(target: Target, method: str, *, seed: int = 1, **options: Any) -> Tiny:
    """Random weights, but for a path that carries the token's embedding to the head: the tiny target is mostly a
    bigram model, so a part of the drafts is accepted."""
    config = tiny_config(target, method, **options)
    params = init(KINDS[method].specs(config), jax.random.key(seed), target.dtype)
    params = jax.tree.map(lambda x: _near_one(x, seed) if x.ndim == 1 else x, params)  # ones would hide a norm
    d, layer = config.decoder.hidden_size, params["layers"][0]
    if method == "mtp":
        params["fc"] = 0.3 * params["fc"].at[:, d:].add(3 * jnp.eye(d, dtype=target.dtype))
    else:
        params["fc"] = 0.3 * params["fc"]
        layer["attn"] |= _token_path(config, layer["attn"])
    layer["mlp"]["down_proj"] = 0.3 * layer["mlp"]["down_proj"]
    table = target.params["embed_tokens"]
    output = table if target.config.tie_embeddings else target.params["lm_head"]
    d2t = None
    if config.trimmed:
        ids = np.random.default_rng(seed).permutation(config.decoder.vocab_size)[: config.draft_vocab_size]
        d2t = jnp.asarray(ids, jnp.int32)
        output = output[d2t]
    return Tiny(KINDS[method].build(params, config, embed=table, head=output, d2t=d2t), params)


def _token_path(config: DrafterConfig, attn: Any) -> Any:
    """EAGLE-3 sees the token in its attention alone: like finds like, and hands its embedding on."""
    decoder, layer = config.decoder, config.decoder.layers[0]
    heads, kv, size, d = decoder.num_heads, layer.num_kv_heads, layer.head_dim, decoder.hidden_size
    keys = attn["k_proj"].reshape(kv, size, 2 * d)
    out = np.zeros((heads, size, d))
    for h in range(kv):  # the first query head of each group
        out[h * heads // kv, :, h * size : (h + 1) * size] = 2 * np.eye(size)
    found = {
        "q_proj": jnp.repeat(keys, heads // kv, axis=0).reshape(heads * size, 2 * d),
        "v_proj": 0.1 * attn["v_proj"].at[:, :d].add(10 * jnp.eye(kv * size, d, dtype=keys.dtype)),
        "o_proj": 0.1 * attn["o_proj"] + jnp.asarray(out.reshape(heads * size, d).T, keys.dtype),
    }
    return found | {name: 3 * attn[name] for name in ("q_norm", "k_norm") if name in attn}


def _near_one(x: Any, seed: int) -> Any:
    return x + 0.2 * jax.random.normal(jax.random.key(seed + 100), x.shape, x.dtype)


SWITCHES = {
    "plain": Eagle3Norms(),
    "norm_before_residual": Eagle3Norms(before_residual=True),
    "norm_before_fc": Eagle3Norms(before_fc=True),
    "fc_norm": Eagle3Norms(each_feature=True),
    "norm_output": Eagle3Norms(output=True),
    "all of EAGLE-3.1": Eagle3Norms(before_residual=True, each_feature=True, output=True),
}


class Argmax:
    """A sampler that takes the most probable token of each row."""

    def __init__(self, d2t: Array | None) -> None:
        self.d2t = d2t

    def start(self) -> Array:
        return jnp.zeros(())

    def numbers(self, places: int) -> None:
        return None

    def draw(self, state: Any, logits: Array, k: Any) -> tuple[Array, Array, Array, Any]:
        index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return index if self.d2t is None else self.d2t[index], index, jnp.max(logits, axis=-1), state


MOST = 5
"""The longest block of ``texts_by_block_length``."""


def texts_by_block_length(target: Target, drafter: Any, new_tokens: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Texts ``[2, MOST + 1, new_tokens]`` and mean committed tokens ``[2, MOST + 1]``: greedy rows, then sampled
    ``coupled`` rows, decoded side by side with blocks of 0 (plain decoding), 1, .. MOST drafts.

    A chain of k drafts is the beginning of a longer one, so that one program serves all. Sampled rows start from a
    prompt of one token, before which a chain knows no state.
    """
    lengths = np.tile(np.arange(MOST + 1), 2)
    rows, sampled = lengths.size, np.arange(lengths.size) > MOST
    prompts = np.tile(np.array([[3, 1, 4, 1, 5, 9]], np.int32), (rows, 1))

    def start() -> cycle.DecodeState:
        state: Any = open_slots(
            target, drafter, jnp.asarray(prompts), max_new_tokens=new_tokens, seeds=jnp.full(rows, 7),
            lengths=jnp.where(sampled, 1, 6), num_drafts=MOST,
            sampling=[Sampling(temperature=0.7 if s else 0.0) for s in sampled],
        )  # fmt: skip
        return state.replace(coupled=jnp.asarray(sampled))

    @jax.jit
    def run(state: cycle.DecodeState) -> tuple[cycle.DecodeState, Array, Array]:
        proposal = cycle.draft(drafter, state, num_drafts=MOST)
        state, out = cycle.step(target, drafter, state, proposal, jnp.asarray(lengths))
        return state, out.tokens, out.count

    state = jax.jit(start)()
    texts: list[list[int]] = [[] for _ in range(rows)]
    cycles = np.zeros(rows)
    while bool(state.active.any()):
        cycles += np.asarray(state.active)
        state, tokens, count = run(state)
        for row in range(rows):
            texts[row] += np.asarray(tokens[row, : int(count[row])]).tolist()
    return np.array(texts).reshape(2, MOST + 1, new_tokens), (new_tokens / cycles).reshape(2, MOST + 1)
