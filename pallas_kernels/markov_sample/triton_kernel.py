"""The Triton kernel of one place of the head. Importing this imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.triton_noise import draw, exponentials, gumbel, scores


@triton.jit
def markov_tile(
    k_ptr, z_ptr, w2_ptr, base_ptr, ids_ptr, inverse_ptr, noisy_ptr,
    word0_ptr, word1_ptr,
    best_ptr, column_ptr, chosen_ptr, top_ptr, total_ptr,
    COUNT: tl.constexpr, VOCAB: tl.constexpr, RANK: tl.constexpr, TRIMMED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of the vocabulary for ROWS rows; ``COUNT`` rows there are. DEPTH: columns of W2 that are multiplied at
    once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there, inside = row < COUNT, at < VOCAB
    product = tl.zeros((ROWS, TILE), tl.float32)
    for d in range(0, RANK, DEPTH):
        depth = d + tl.arange(0, DEPTH)
        deep = depth < RANK
        z = tl.load(z_ptr + row[:, None] * RANK + depth[None, :], mask=there[:, None] & deep[None, :], other=0.0)
        w = tl.load(
            w2_ptr + at[None, :].to(tl.int64) * RANK + depth[:, None], mask=inside[None, :] & deep[:, None], other=0.0
        )
        product = tl.dot(z, w, product, input_precision="ieee")
    place_row = tl.load(k_ptr).to(tl.int64) * COUNT + row
    here = there[:, None] & inside[None, :]
    base = tl.load(base_ptr + place_row[:, None] * VOCAB + at[None, :], mask=here, other=0.0).to(tl.float32)
    inverse = tl.load(inverse_ptr + row, mask=there, other=0.0)
    noisy = tl.load(noisy_ptr + row, mask=there, other=0.0)
    word0 = tl.load(word0_ptr + place_row, mask=there, other=0)
    word1 = tl.load(word1_ptr + place_row, mask=there, other=0)
    ids = at
    if TRIMMED:
        ids = tl.load(ids_ptr + at, mask=inside, other=0)
    x = scores((product + base) * inverse[:, None], inside)
    top, total = exponentials(x)
    best, column = draw(x, gumbel(word0[:, None], word1[:, None], ids[None, :]), noisy, at, VOCAB)
    chosen = tl.max(tl.where(at[None, :] == column[:, None], x, -3.0e38), axis=1)
    out = tl.program_id(1) * COUNT + row
    tl.store(best_ptr + out, best, mask=there)
    tl.store(column_ptr + out, column, mask=there)
    tl.store(chosen_ptr + out, chosen, mask=there)
    tl.store(top_ptr + out, top, mask=there)
    tl.store(total_ptr + out, total, mask=there)
