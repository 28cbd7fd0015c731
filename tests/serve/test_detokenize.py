"""Tokens to text: whole characters, stop strings, nothing that depends on block boundaries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from dspark_jax.serve.detokenize import REPLACEMENT, StopStrings, detokenizer_factory


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    detokenizer = detokenizer_factory(tokenizer)()
    return [*(detokenizer.push(t) for t in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", ["hello world", "naïve café €5 😀!", "日本語 👩‍👩‍👧 ½", "<say it>tab\t\n  end "])
def test_joined_pieces_equal_decoding_at_once(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    got = pieces(tokenizer, tokens)
    assert "".join(got) == tokenizer.decode(tokens) == text
    assert REPLACEMENT not in "".join(got)


def test_a_character_of_four_byte_tokens_appears_with_its_last_one(tokenizer: Any) -> None:
    tokens = [t for b in "😁".encode() for t in tokenizer.convert_tokens_to_ids([_spelled(b)])]
    assert len(tokens) == 4
    assert pieces(tokenizer, tokens) == ["", "", "", "😁", ""]


def test_an_answer_cut_inside_a_character_ends_with_one_replacement_mark(tokenizer: Any) -> None:
    tokens = [t for b in "a😁".encode()[:-1] for t in tokenizer.convert_tokens_to_ids([_spelled(b)])]
    got = pieces(tokenizer, tokens)
    assert got == ["a", "", "", "", REPLACEMENT]
    assert "".join(got) == tokenizer.decode(tokens)


def test_any_token_sequence_gives_the_text_of_the_tokenizer(tokenizer: Any) -> None:
    """Random ids, invalid UTF-8 and special tokens included: special tokens are not shown."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))]
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_ids_without_a_token_give_no_text(tokenizer: Any) -> None:
    assert pieces(tokenizer, [len(tokenizer) + 5]) == ["", ""]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces(None, [1, 2]) == ["", "", ""]


class Sentencepiece:
    """The surface of a transformers tokenizer around a byte-fallback tokenizer (Llama-2 style)."""

    all_special_ids = (0,)
    added_tokens_decoder: dict[int, Any] = {}

    def __init__(self) -> None:
        byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
        vocab = {t: i for i, t in enumerate(["<s>", "▁he", "llo", "▁wor", "ld", "▁", *byte_tokens])}
        self.backend_tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
        steps = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        self.backend_tokenizer.decoder = decoders.Sequence(steps)
        self.longest_window = 0

    def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        self.longest_window = max(self.longest_window, len(tokens))
        return self.backend_tokenizer.decode(list(tokens))


def test_other_tokenizers_keep_their_spaces_and_characters() -> None:
    fake = Sentencepiece()
    tokens = [0, 1, 2, 3, 4, *(6 + b for b in "é😀".encode()), 1]
    got = pieces(fake, tokens)
    assert "".join(got) == "hello worldé😀 he"
    assert all(REPLACEMENT not in piece for piece in got)


def test_other_tokenizers_decode_a_bounded_window_even_for_garbage() -> None:
    fake = Sentencepiece()
    rng = random.Random(1)
    pieces(fake, [6 + rng.randrange(128, 256) for _ in range(500)] + [0] * 100)
    assert fake.longest_window < 32


def _spelled(byte: int) -> str:
    from dspark_jax.serve.detokenize import _byte_alphabet

    return {b: c for c, b in _byte_alphabet().items()}[byte]


def cut(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(part) for part in parts)
    return (shown if matcher.hit is not None else shown + matcher.flush()), matcher.hit


@pytest.mark.parametrize(
    ("stops", "text", "shown", "hit"),
    [
        (["STOP"], "one STOP two", "one ", "STOP"),
        (["STOP"], "one STO two", "one STO two", None),
        (["STOP"], "one STO", "one STO", None),
        (["aab"], "aaaab", "aa", "aab"),
        (["abc", "b"], "xabc", "xa", "b"),  # completed first
        (["ab", "b"], "xab", "x", "ab"),  # completed together: the longest
        (["\n\n"], "a\n\nb", "a", "\n\n"),
        ([], "anything", "anything", None),
        (["é"], "caféteria", "caf", "é"),
    ],
)
def test_stop_strings_cut_the_same_wherever_the_text_is_split(
    stops: list[str], text: str, shown: str, hit: str | None
) -> None:
    rng = random.Random(2)
    assert cut(stops, [text]) == (shown, hit)
    assert cut(stops, list(text)) == (shown, hit)
    for _ in range(20):
        parts, rest = [], text
        while rest:
            n = rng.randrange(1, len(rest) + 1)
            parts.append(rest[:n])
            rest = rest[n:]
        assert cut(stops, parts) == (shown, hit)


def test_stop_strings_agree_with_a_plain_search_on_random_text() -> None:
    rng = random.Random(3)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(3)]
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        want = (text, None) if not ends else (text[: min(ends)[0] + min(ends)[1]], min(ends)[2])
        assert cut(stops, list(text)) == want


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("go ST") == "go "
    assert matcher.push("R") == "STR"
    assert matcher.push("S") == ""
    assert matcher.push("SS") == "SS"
    assert matcher.flush() == "S"
