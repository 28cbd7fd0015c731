"""Published models as data: shapes of Qwen3 targets and of their DSpark drafters, without a weight.

The drafters follow deepseek-ai/dspark_qwen3_8b_block7: five of the target's layers, five taps spread over its depth,
rank 256, one vocabulary (tests/checkpoint/test_deepspec_published.py holds that file's own configuration).
"""

from __future__ import annotations

import dataclasses

from dspark_jax.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig

VOCAB, RANK, MASK_TOKEN = 151_936, 256, 151_669
DRAFT_LAYERS, TAPS = 5, 5


def _qwen3(layers: int, hidden: int, inner: int, heads: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        layers=(LayerConfig(num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)),) * layers,
        qk_norm=True,
        tie_embeddings=tied,
        max_positions=40_960,
    )


TARGETS: dict[str, DecoderConfig] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32, False),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40, False),
}


def with_layers(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The same model with another depth."""
    return dataclasses.replace(config, layers=config.layers[:1] * layers)


def drafter_config(target: DecoderConfig, block: int = 7, layers: int = DRAFT_LAYERS) -> DrafterConfig:
    """The DSpark drafter of a target: ``block`` drafts, vanilla Markov head, confidence head."""
    last = max(target.num_layers - 3, 1)
    taps = sorted({1 + (last - 1) * i // (TAPS - 1) for i in range(TAPS)})
    return DrafterConfig(
        method="dspark",
        decoder=dataclasses.replace(target, layers=target.layers[:1] * layers, tie_embeddings=False),
        block_size=block,
        target_layer_ids=tuple(taps),
        mask_token_id=MASK_TOKEN,
        num_target_layers=target.num_layers,
        markov_rank=RANK,
        confidence_head=True,
    )
