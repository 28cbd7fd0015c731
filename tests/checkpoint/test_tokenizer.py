"""Tokenizers from GGUF metadata: the splitter the file names, special tokens, bos, chat template."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from dspark_jax.checkpoint.gguf import GGUFSource
from dspark_jax.checkpoint.tokenizer import tokenizer_from_directory, tokenizer_from_gguf
from dspark_jax.targets.embedded import find_embedded
from tests.checkpoint.gguf_writer import llama_metadata, write_gguf

SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["4 2", "Ġ 4", "Ġ 42", "h i", "Ġ hi"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "word", "<extra>"]
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|start|>system\nBe kind<|end|>\n"
    "{% endif %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
)


def gguf(path: Path, pre: str | None = None, **extra: Any) -> GGUFSource:
    """A GGUF file without tensors; ``extra`` overrides ``tokenizer.ggml.<key>``."""
    fields: dict[str, Any] = {
        "model": "gpt2",
        "tokens": TOKENS,
        "token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4],
        "merges": MERGES,
        "padding_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"pre": pre} if pre is not None else {}),
        **extra,
    }
    metadata = {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}
    metadata["tokenizer.chat_template"] = TEMPLATE
    return GGUFSource(write_gguf(path / "tok.gguf", llama_metadata() | metadata, {}))


@pytest.mark.parametrize(
    ("pre", "want"),
    [
        (None, ["Ġ42"]),
        ("gpt-2", ["Ġ42"]),
        ("smollm", ["Ġ", "4", "2"]),  # digits are split off one by one, the space stays behind
        ("qwen2", ["Ġ", "4", "2"]),
        ("llama-bpe", ["Ġ", "42"]),  # groups of up to three digits, the space stays behind
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str | None, want: list[str]) -> None:
    assert tokenizer_from_gguf(gguf(tmp_path, pre)).tokenize(" 42") == want


def test_only_qwen2_composes_accents_and_only_llama3_takes_whole_words(tmp_path: Path) -> None:
    """Qwen normalises to NFC (e + combining accent -> é); Llama 3 has words that no merge builds."""
    qwen, llama = (tokenizer_from_gguf(gguf(tmp_path, pre)) for pre in ("qwen2", "llama-bpe"))
    assert qwen.tokenize("e\u0301") == ["Ã", "©"] and llama.tokenize("e\u0301") == ["e", "Ì", "ģ"]
    assert qwen.tokenize("word") == list("word") and llama.tokenize("word") == ["word"]


def test_an_unknown_splitter_or_model_is_refused_and_the_known_ones_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tok\.gguf: unknown pre-tokenizer.*'tekken'; known: .*smollm.*qwen2"):
        tokenizer_from_gguf(gguf(tmp_path, "tekken"))
    with pytest.raises(ValueError, match=r"tok\.gguf: unsupported GGUF tokenizer model 'llama'"):
        tokenizer_from_gguf(gguf(tmp_path, model="llama"))
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.merges, tokenizer\.ggml\.token_type"):
        tokenizer_from_gguf(gguf(tmp_path, merges=None, token_type=None))


def test_special_tokens_are_one_token_and_can_be_skipped(tmp_path: Path) -> None:
    tok = tokenizer_from_gguf(gguf(tmp_path, "smollm"))
    ids = tok("<|start|>hi<extra><|end|>").input_ids
    assert [tok.convert_ids_to_tokens(i) for i in ids] == ["<|start|>", "hi", "<extra>", "<|end|>"]
    assert (tok.pad_token_id, tok.bos_token_id, tok.eos_token_id, tok.unk_token_id) == (0, 1, 2, None)
    # <extra> is user-defined: never split, but part of the text.
    assert tok.decode(ids, skip_special_tokens=True) == "hi<extra>"
    assert len(tok) == len(TOKENS)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_decoding_gives_the_text_back(tmp_path: Path, pre: str) -> None:
    tok = tokenizer_from_gguf(gguf(tmp_path, pre, add_bos_token=False))
    text = "  1½ , hi ! \n\n\tcafé 中文 🙂 don't  "
    assert tok.decode(tok(text).input_ids) == text


def test_the_begin_token_is_added_where_the_file_says_so_and_by_default_for_llama3(tmp_path: Path) -> None:
    def first(**options: Any) -> list[int]:
        return tokenizer_from_gguf(gguf(tmp_path, **options))("hi").input_ids

    hi = TOKENS.index("hi")
    assert first(pre="smollm") == [hi]
    assert first(pre="smollm", add_bos_token=True) == [1, hi]
    assert first(pre="llama-bpe") == [1, hi]
    assert first(pre="llama-bpe", add_bos_token=False) == [hi]
    assert first(pre="smollm", add_eos_token=True) == [hi, 2]


def test_the_chat_template_keeps_its_default_system_message(tmp_path: Path) -> None:
    tok = tokenizer_from_gguf(gguf(tmp_path, "smollm"))
    text = tok.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|start|>system\nBe kind<|end|>\n<|start|>user\nhi<|end|>\n"
    text = tok.apply_chat_template([{"role": "system", "content": "Hm"}], tokenize=False)
    assert text == "<|start|>system\nHm<|end|>\n"


def test_a_directory_gives_the_same_tokenizer_back_with_its_chat_template(tmp_path: Path) -> None:
    tok = tokenizer_from_gguf(gguf(tmp_path, "smollm"))
    tok.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").is_file()
    again = tokenizer_from_directory(tmp_path / "saved")
    assert again is not None
    text = "hi <|start|> 42 ½\n"
    assert again(text).input_ids == tok(text).input_ids
    assert again.chat_template == TEMPLATE
    (tmp_path / "empty").mkdir()
    assert tokenizer_from_directory(tmp_path / "empty") is None


def test_nothing_is_printed_and_torch_is_not_imported(tmp_path: Path) -> None:
    gguf(tmp_path, "smollm")
    code = (
        "import sys; from dspark_jax.checkpoint.gguf import GGUFSource\n"
        "from dspark_jax.checkpoint.tokenizer import tokenizer_from_gguf\n"
        f"print(tokenizer_from_gguf(GGUFSource({str(tmp_path / 'tok.gguf')!r}))('hi').input_ids)\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines()[0] == f"[{TOKENS.index('hi')}]"
    assert done.stderr == ""


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return tokenizer_from_gguf(GGUFSource(find_embedded("smollm2-135m-instruct")))


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("\n\n  42", ["ĊĊĠĠ", "4", "2"]),
        (" ½", ["Ġ", "Â½"]),
        ("in 2026.", ["in", "Ġ", "2", "0", "2", "6", "."]),
    ],
)
def test_smollm2_splits_digits_one_by_one(smollm2: Any, text: str, want: list[str]) -> None:
    """Trap: the generic conversion of GGUF files forgets the digit split. These are llama.cpp's tokens."""
    assert smollm2.tokenize(text) == want


@pytest.mark.real_model
def test_smollm2_has_its_special_tokens_and_default_system_message(smollm2: Any) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert (smollm2.pad_token_id, smollm2.unk_token_id) == (2, 0)
    assert smollm2("<|im_start|>hi<|im_end|>").input_ids[::2] == [1, 2]
    ids = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert smollm2.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(smollm2) == 49152 and smollm2.model_max_length == 8192
