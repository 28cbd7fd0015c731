"""Tokenizers: from a GGUF file's metadata, or from a Hugging Face directory. No torch, no network, no output.

Trap: what splits text before the byte-pair merges is only named in a GGUF file (``tokenizer.ggml.pre``).
Taking GPT-2's rule for all of them changes the tokens of digits, blank lines and accents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_jax.checkpoint.gguf import GGUFSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _byte_level(use_regex: bool = True) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)])


def _smollm() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


# llama.cpp's name -> our splitter. Names that llama.cpp treats alike share a row.
_SPLITTERS: Mapping[str, Callable[[], Any]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "gpt2": _byte_level,
    "smollm": _smollm,
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
}
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")


def tokenizer_from_gguf(source: GGUFSource) -> PreTrainedTokenizerFast:
    """The transformers tokenizer that a GGUF file describes: byte-level BPE, special tokens, chat template.

    Raises:
        ValueError: another tokenizer model than byte-level BPE (``gpt2``), an unknown pre-tokenizer (with
            the known ones; a wrong one would silently change the tokens), or lists that are missing.
    """
    meta = source.metadata
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"{source.path}: unsupported GGUF tokenizer model {model!r}; supported: gpt2")
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITTERS:
        raise ValueError(
            f"{source.path}: unknown pre-tokenizer tokenizer.ggml.pre = {pre!r}; known: {', '.join(_SPLITTERS)}"
        )
    lists = [f"tokenizer.ggml.{key}" for key in ("tokens", "merges", "token_type")]
    missing = [key for key in lists if meta.get(key) is None]
    if missing:
        raise ValueError(f"{source.path}: the GGUF file lacks {', '.join(missing)}")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    named = {
        name: tokens[meta[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
        )
        if 0 <= meta.get(key, -1) < len(tokens)
    }
    if meta.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES) and "bos_token" in named:
        named["add_bos_token"] = True
    if meta.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        named["add_eos_token"] = True
    transformers = import_transformers()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_bpe(meta, pre),
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=source.get("context_length", int(1e30)),
        **named,
    )


def _bpe(meta: Mapping[str, Any], pre: str) -> Any:
    """The ``tokenizers.Tokenizer``: vocabulary, merges, splitter, special tokens."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3's vocabulary holds words that its merges do not build.
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    if pre in _QWEN2_NAMES:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = _SPLITTERS[pre]()
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = meta["tokenizer.ggml.token_type"]
    bpe.add_special_tokens([_added(tokens[i], True) for i in (kinds == _CONTROL).nonzero()[0]])
    bpe.add_tokens([_added(tokens[i], False) for i in (kinds == _USER_DEFINED).nonzero()[0]])
    return bpe


def _added(token: str, special: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(token, special=special, normalized=False)


def tokenizer_from_directory(path: str | Path) -> Any | None:
    """The tokenizer of a Hugging Face directory, with its chat template; None where there is none."""
    path = Path(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return import_transformers().AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def import_transformers() -> Any:
    """transformers, without its advice that torch is not installed (nothing here needs torch)."""
    key = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(key)
    os.environ[key] = before or "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[key]
    return transformers
