"""The Triton kernel of row statistics. Importing this imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_noise import draw, exponentials, gumbel, scores


@triton.jit
def rows_tile(
    logits_ptr, inverse_ptr, noisy_ptr, word0_ptr, word1_ptr, token_ptr,
    best_ptr, column_ptr, top_ptr, total_ptr, found_ptr,
    COUNT: tl.constexpr, VOCAB: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of the vocabulary for ROWS rows; ``COUNT`` rows there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there, inside = row < COUNT, at < VOCAB
    cells = row[:, None].to(tl.int64) * VOCAB + at[None, :]
    logits = tl.load(logits_ptr + cells, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + row, mask=there, other=0.0)
    noisy = tl.load(noisy_ptr + row, mask=there, other=0.0)
    word0 = tl.load(word0_ptr + row, mask=there, other=0)
    word1 = tl.load(word1_ptr + row, mask=there, other=0)
    token = tl.load(token_ptr + row, mask=there, other=-1)
    x = scores(logits * inverse[:, None], inside)
    top, total = exponentials(x)
    found = tl.max(tl.where(at[None, :] == token[:, None], x, -3.0e38), axis=1)
    best, column = draw(x, gumbel(word0[:, None], word1[:, None], at[None, :]), noisy, at, VOCAB)
    out = tl.program_id(1) * COUNT + row
    tl.store(best_ptr + out, best, mask=there)
    tl.store(column_ptr + out, column, mask=there)
    tl.store(top_ptr + out, top, mask=there)
    tl.store(total_ptr + out, total, mask=there)
    tl.store(found_ptr + out, found, mask=there)
