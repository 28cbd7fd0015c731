"""Random transformers small enough for float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig
from dspark_jax.drafters.dspark import Drafter
from dspark_jax.params import init
from dspark_jax.targets import Target, decoder_specs
from dspark_jax.types import Array


def tiny_target(
    family: str = "qwen3",
    *,
    seed: int = 0,
    vocab_size: int = 32,
    hidden_size: int = 16,
    num_layers: int = 3,
    head_dim: int = 8,
    dtype: Any = jnp.float32,
    tie_embeddings: bool = False,
    max_positions: int = 256,
    scan: bool | None = None,
) -> Target:
    """A random target, mostly a bigram model (its layers are scaled down), so that a drafter can do well on it."""
    layer = LayerConfig(num_kv_heads=2, head_dim=head_dim, rope=RopeConfig())
    config = DecoderConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_heads=4,
        layers=(layer,) * num_layers,
        qk_norm=family == "qwen3",
        tie_embeddings=tie_embeddings,
        max_positions=max_positions,
    )
    params = _scaled(init(decoder_specs(config), jax.random.key(seed), dtype), 0.3)
    params["embed_tokens"] = params["embed_tokens"] * 50.0  # standard deviation 1
    if not tie_embeddings:
        params["lm_head"] = params["lm_head"] * 30.0
    return Target.build(params, config, name=f"tiny-{family}", scan=scan)


def tiny_drafter(
    target: Target,
    *,
    head: str = "vanilla",
    seed: int = 1,
    block_size: int = 4,
    num_layers: int = 1,
    confidence: bool | None = None,
    draft_vocab_size: int = 0,
    target_layer_ids: tuple[int, ...] = (0, 1),
    **config: Any,
) -> Drafter:
    """A random drafter for a tiny target.

    Args:
        head: vanilla | gated | rnn | none (DFlash). confidence: None: with any Markov head.
        draft_vocab_size: Vd of a trimmed vocabulary (every second token first), 0 for the whole one.
        config: further fields of ``DrafterConfig``.
    """
    decoder, params = target.config, target.params
    table = params["embed_tokens"]
    output = table if decoder.tie_embeddings else params["lm_head"]
    backbone = replace(decoder, layers=decoder.layers[:1] * num_layers, tie_embeddings=False)
    rank = 0 if head == "none" else decoder.hidden_size
    trimmed = draft_vocab_size > 0
    drafter_config = DrafterConfig(
        method="dflash" if head == "none" else "dspark",
        decoder=backbone,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        mask_token_id=decoder.vocab_size - 1,
        num_target_layers=decoder.num_layers,
        markov_rank=rank,
        markov_head=head if rank else "vanilla",
        confidence_head=bool(rank) if confidence is None else confidence,
        confidence_with_markov=bool(rank),
        draft_vocab_size=draft_vocab_size,
        trimmed=trimmed,
        **config,
    )
    d2t = None
    if trimmed:
        order = np.argsort(np.arange(decoder.vocab_size) % 2, kind="stable")
        d2t = jnp.asarray(np.sort(order[:draft_vocab_size]), jnp.int32)
        output = output[d2t]
    drafter = Drafter.random(drafter_config, jax.random.key(seed), embed=table, head=output, d2t=d2t)
    drafter_params = _scaled(drafter.params, 0.3)
    if rank:
        # The bias W2 W1[prev] is then close to the bigram part of the target's logits.
        noise = jax.random.normal(jax.random.key(seed + 1), output.shape, jnp.float32).astype(output.dtype)
        drafter_params["markov"] = {**drafter.params["markov"], "w1": table, "w2": output + 0.1 * noise}
    if drafter_config.confidence_head:
        proj = drafter.params["confidence"]["proj"] * 50.0
        drafter_params["confidence"] = {**drafter.params["confidence"], "proj": proj}
    return drafter.replace(params=drafter_params)


def _scaled(params: Any, factor: float) -> Any:
    """The tree with what each branch adds to the residual stream scaled."""

    def scale(path: Any, value: Array) -> Array:
        name = getattr(path[-1], "key", "")
        return value * factor if name in ("o_proj", "down_proj") else value

    return jax.tree_util.tree_map_with_path(scale, params)
