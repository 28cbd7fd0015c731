"""A loaded target: parameters, configuration and tokenizer in one pytree."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig
from dspark_jax.kv_cache import KVCache, init_cache
from dspark_jax.layout import Layout
from dspark_jax.nn.block import fuse_projections
from dspark_jax.params import abstract, init, on_one_device, spread, stack_layers
from dspark_jax.sampling import mask_beyond
from dspark_jax.targets.decoder import decoder_specs, embed, forward, unembed
from dspark_jax.types import Array, Opaque, PyTree


def stop_ids(target: Any) -> tuple[int, ...]:
    """Token ids that end a text of ``target``: those of its configuration, then its tokenizer's own where it is another
    (of chat models whose configuration names the end of a document alone, the tokenizer's ends a turn).

    Args:
        target: a Target, or what stands for one; without a configuration it has those of its tokenizer.
    """
    known = getattr(getattr(target, "config", None), "eos_token_ids", ())
    own = getattr(getattr(target, "tokenizer", None), "eos_token_id", None)
    return tuple(dict.fromkeys([*known, *([] if own is None else [own])]))


class Target(flax.struct.PyTreeNode):
    """A frozen language model. A pytree: pass it to ``jax.jit`` as an argument, never close over it.

    Build one with ``dspark_jax.load_target`` or, from parameters at hand, with ``Target.build``.
    """

    params: PyTree
    config: DecoderConfig = flax.struct.field(pytree_node=False)
    tokenizer_box: Opaque = flax.struct.field(pytree_node=False)
    name: str = flax.struct.field(pytree_node=False)
    vocab_limit: int = flax.struct.field(pytree_node=False)
    spread: bool = flax.struct.field(
        pytree_node=False, default=False
    )  # over several devices: no kernel is cut for them

    @classmethod
    def build(
        cls,
        params: PyTree,
        config: DecoderConfig,
        *,
        tokenizer: Any = None,
        name: str = "",
        scan: bool | None = None,
        fuse: bool | None = None,
    ) -> Target:
        """Wraps a parameter tree of ``decoder_specs(config)``.

        Args:
            tokenizer: a transformers tokenizer or None. Logits of ids at or beyond its length are masked: heads
                are often padded (Qwen3: 151936 rows for 151669 tokens).
            scan: layers stacked and scanned (True) or unrolled (False); None chooses unrolled on CPU, where code
                specialised to each layer is faster, and scanned elsewhere if all layers have one shape.
            fuse: q, k, v and gate, up as one matrix each (see ``nn.block.fuse_projections``); None: on one CPU.
        """
        if fuse is None:
            fuse = jax.default_backend() == "cpu" and on_one_device(params)
        if fuse:
            params = {**params, "layers": [fuse_projections(layer) for layer in params["layers"]]}
        if scan is None:
            scan = jax.default_backend() != "cpu" and config.uniform
        if scan and not config.uniform:
            raise ValueError("layers of different shapes cannot be scanned; use scan=False")
        if scan and isinstance(params["layers"], list | tuple):
            params = {**params, "layers": stack_layers(list(params["layers"]))}
        limit = config.vocab_size if tokenizer is None else min(config.vocab_size, len(tokenizer))
        return cls(params, config, Opaque(tokenizer), name, limit, spread(params))

    @classmethod
    def random(cls, config: DecoderConfig, key: Array, dtype: Any = jnp.float32, **options: Any) -> Target:
        """A target with random weights, for tests and speed measurements."""
        return cls.build(init(decoder_specs(config), key, dtype), config, **options)

    @classmethod
    def shapes(cls, config: DecoderConfig, dtype: Any = jnp.float32, **options: Any) -> Target:
        """A target of ``ShapeDtypeStruct`` leaves, for compiling without weights."""
        build = partial(cls.build, config=config, **{"scan": False, "fuse": False, **options})
        return jax.eval_shape(build, abstract(decoder_specs(config), dtype))

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None where the directory has none."""
        return self.tokenizer_box.value

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the parameters."""
        return self.params["embed_tokens"].dtype

    @property
    def stacked(self) -> bool:
        """Layers are scanned."""
        return not isinstance(self.params["layers"], list | tuple)

    @property
    def max_positions(self) -> int:
        """The context window, in tokens."""
        return self.config.max_positions

    @property
    def vocab_size(self) -> int:
        """V, rows of the LM head."""
        return self.config.vocab_size

    def init_cache(self, slots: int, length: int) -> KVCache:
        """An empty key/value cache; see ``kv_cache.init_cache`` for the length it needs."""
        return init_cache(self.config.layers, slots, length, self.dtype, self.stacked)

    def forward(
        self, tokens: Array, layout: Layout, cache: KVCache, *, taps: tuple[int, ...] = (), context: int | None = None
    ) -> tuple[Array, Array, KVCache]:
        """See ``decoder.forward``."""
        return forward(self.params, self.config, tokens, layout, cache, taps=taps, context=context, spread=self.spread)

    def embed(self, tokens: Array) -> Array:
        """Embeddings ``[..., d]``."""
        return embed(self.params, self.config, tokens)

    def unembed(self, hidden: Array) -> Array:
        """Logits ``[..., V]``; ids beyond the tokenizer are -inf."""
        logits = unembed(self.params, self.config, hidden)
        return mask_beyond(logits, None, self.vocab_limit)
