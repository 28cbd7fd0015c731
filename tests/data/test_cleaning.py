"""Repeats and overlap with evaluation sets."""

from __future__ import annotations

from dspark_jax.data.cleaning import OVERLAP_WORDS, Overlap, Seen


def test_spacing_case_and_punctuation_make_no_new_text() -> None:
    seen = Seen()
    assert seen.add("What is 2 + 2?") and not seen.add("  what IS 2+2") and seen.add("what is 22")


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not() -> None:
    evaluation = " ".join(f"w{i}" for i in range(20))
    overlap = Overlap([evaluation])
    inner = [f"w{i}" for i in range(3, 3 + OVERLAP_WORDS)]
    assert "before " + ", ".join(inner).upper() + " after" in overlap
    assert "before " + " ".join(inner[:-1]) + " after" not in overlap
    assert "" not in overlap and "anything" not in Overlap([]) and "anything" not in Overlap(["", "?!"])


def test_a_short_prompt_overlaps_as_a_whole() -> None:
    overlap = Overlap(["Name three rivers."])
    assert "Please: name three rivers in Peru" in overlap and "name three big rivers" not in overlap
