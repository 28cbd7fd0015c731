"""Frozen configurations of decoders and drafters, hashable so that they can be static arguments of ``jax.jit``.

A model family is data: the fields below describe Llama, Qwen3 and Gemma 4 decoders without a line of
family-specific forward code. ``config_io`` reads and writes the Hugging Face spelling.
"""

from __future__ import annotations

import dataclasses
import numbers

from dspark_jax.types import EMPTY


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``kind``: default | linear | llama3 | yarn | dynamic | proportional.

    Attributes:
        theta: base of the frequencies.
        factor: context stretch of the scaled kinds.
        low_freq_factor, high_freq_factor: the blend window of ``llama3``.
        original_max_positions: trained context of the scaled kinds, in tokens.
        partial_rotary_factor: share of the head that rotates.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: of ``yarn``.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    partial_rotary_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers of one decoder. ``window`` 0 means full attention, otherwise the number of
    positions a token sees, its own included. ``k_eq_v``: the values are the raw key projections (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int = 0
    k_eq_v: bool = False


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer (a target, or the layers of a drafter).

    Attributes:
        family: the checkpoint's model_type, a row of ``config_io.FAMILIES``; decides names, not arithmetic.
        layers: one LayerConfig a layer.
        qk_norm: RMSNorm over the head dimension of queries and keys (Qwen3).
        v_norm: weightless RMSNorm of the values (Gemma 4).
        sandwich_norm: a norm before and after each branch (Gemma 4).
        layer_scalar: a stored factor multiplies each layer's output (Gemma 4).
        attention_scale: factor of the scores; None means 1/sqrt(head_dim).
        embed_scale: factor of the embedding output (1.0 but for Gemma).
        logit_softcap: 0.0, or c in ``c * tanh(logits / c)``.
        tie_embeddings: the LM head is the embedding table.
        max_positions: the context window, in tokens.
        eos_token_ids: tokens that end a text.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    qk_norm: bool = False
    v_norm: bool = False
    sandwich_norm: bool = False
    layer_scalar: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    embed_scale: float = 1.0
    logit_softcap: float = 0.0
    tie_embeddings: bool = False
    max_positions: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def uniform(self) -> bool:
        """All layers have the same shapes and positions, so that they can be stacked and scanned."""
        return all(layer == self.layers[0] for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class Eagle3Norms:
    """Norms that an EAGLE-3 checkpoint may have been trained with (speculators' names in brackets).

    Attributes:
        before_residual: the residual stream carries the normed hidden state (``norm_before_residual``).
        before_fc: one norm over the concatenated features (``norm_before_fc``).
        each_feature: one norm for each tapped layer (``fc_norm``).
        output: the next step reads the state after the last norm (``norm_output``).
    """

    before_residual: bool = False
    before_fc: bool = False
    each_feature: bool = False
    output: bool = False

    def __post_init__(self) -> None:
        if self.before_fc and self.each_feature:
            raise ValueError("norm_before_fc and fc_norm exclude each other: the features are normed once")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A block drafter (DFlash backbone, optional Markov and confidence heads) or a chain (EAGLE-3, MTP).

    Attributes:
        method: ``dspark``, ``dflash``, ``eagle3`` or ``mtp``.
        decoder: the backbone's layers. ``decoder.vocab_size`` is the target's vocabulary.
        block_size: G, draft tokens a block: the anchor slot and G - 1 mask slots, each of which predicts one
            token. (Layouts whose anchor slot predicts nothing are converted at load; see ``sample_from_anchor``.)
            Of a chain: the drafts it makes where nobody says how many, those it was trained for (``ttt_length``).
        target_layer_ids: tapped target layers; i is the output of decoder layer i, -1 the embedding output.
        mask_token_id: the token of the mask slots, EMPTY for a chain, which has none.
        num_target_layers: layers of the target it was trained for, 0 if unknown.
        markov_rank: 0 means no Markov head.
        markov_head: vanilla | gated | rnn.
        confidence_head: a confidence head is there.
        confidence_with_markov: its input is [h; W1[prev]] rather than h.
        draft_vocab_size: Vd; equal to decoder.vocab_size where the vocabulary is whole.
        trimmed: a d2t map belongs to the checkpoint.
        sample_from_anchor: True: slot k predicts position start + k + 1. False (fill-in layout): slot 0 predicts
            nothing and slot k predicts the mask's own place start + k, so a block of width G + 1 makes G drafts.
        block_widths: further widths the backbone was trained at (extension of DeepSpec's layout).
        logit_softcap: of the base logits, before the Markov bias.
        norms: of EAGLE-3.
    """

    method: str
    decoder: DecoderConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int = EMPTY
    num_target_layers: int = 0
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    draft_vocab_size: int = 0
    trimmed: bool = False
    sample_from_anchor: bool = True
    block_widths: tuple[int, ...] = ()
    logit_softcap: float = 0.0
    norms: Eagle3Norms = Eagle3Norms()

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, found {self.block_size}")
        if not self.chain and self.mask_token_id < 0:
            raise ValueError(f"a {self.method} drafter needs a mask_token_id")
        if self.chain and len(self.decoder.layers) != 1:
            raise ValueError(f"an {self.method} drafter has one layer, found {len(self.decoder.layers)}")
        if self.draft_vocab_size == 0:
            object.__setattr__(self, "draft_vocab_size", self.decoder.vocab_size)

    @property
    def chain(self) -> bool:
        """It drafts one token after the other, a block of any length."""
        return self.method in ("eagle3", "mtp")

    def block_width(self, num_speculative_tokens: int) -> int:
        """Slots the backbone runs for k wanted drafts: the smallest trained block that holds them.

        The one conversion between "drafts wanted" and "block width": a bidirectional block of another width is
        another function, so only trained widths are ever run.
        """
        wanted = num_speculative_tokens + (0 if self.sample_from_anchor else 1)
        full = self.block_size + (0 if self.sample_from_anchor else 1)
        if not 1 <= num_speculative_tokens <= self.block_size:
            raise ValueError(
                f"num_speculative_tokens must lie in 1..{self.block_size} (the drafter's block), "
                f"found {num_speculative_tokens}"
            )
        return wanted if wanted in self.block_widths else full


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request samples. Order: temperature, top-k, top-p, min-p (DESIGN section 3).

    Attributes:
        temperature: 0 (below 1e-5) is greedy.
        top_k: keep the k most probable tokens; 0 keeps all. Ties at the edge are kept.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1.0 keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one; 0.0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, numbers.Real) and not isinstance(value, bool), "a number")
        _require("temperature", self.temperature, 0.0 <= self.temperature < float("inf"), "a finite number >= 0")
        _require("top_k", self.top_k, self.top_k >= 0 and self.top_k % 1 == 0, "an integer >= 0")
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "in [0, 1]")


def _require(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {wanted}, found {value!r}")


__all__ = ["EMPTY", "DecoderConfig", "DrafterConfig", "Eagle3Norms", "LayerConfig", "RopeConfig", "Sampling"]
