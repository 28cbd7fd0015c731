"""How far is the greedy token ahead of the next one, and do speculative texts part from plain ones at small gaps only?

    python benchmarks/argmax_gaps.py --prompts mt-bench.jsonl --limit 8 --dtype bfloat16 --out gaps.json

Greedy texts of one model in one dtype, plain and speculative. In float32 two programs of different shape compute logits
that differ by about 1e-4; in bfloat16 by about 1e-1, which is above the gap between the two likeliest tokens once in a
few dozen tokens, so that texts part there though nothing is wrong. The report says how gaps are distributed along the
plain texts, where each speculative text first differs from its plain one, and the plain decoder's gap between the two
tokens there. A text that parts at a wide gap is a fault; equality in bfloat16 is reported and promised by nobody.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import environment, write

import dspark_jax
from dspark_jax.data.prompts import read_prompts
from dspark_jax.layout import dense_layout
from dspark_jax.targets import Target, stop_ids

EDGES = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Gaps in logits; the report counts the tokens below each."""


@jax.jit
def text_logits(target: Target, tokens: jax.Array) -> jax.Array:
    """``[L, V]`` float32 logits after every token of one text ``tokens [L]``, right-padded, in one forward."""
    size = tokens.shape[0]
    layout = dense_layout(jnp.zeros(1, jnp.int32), jnp.full(1, size), size)
    hidden, _, _ = target.forward(tokens, layout, target.init_cache(1, size))
    return target.unembed(hidden).astype(jnp.float32)


def first_difference(plain: np.ndarray, other: np.ndarray) -> int | None:
    """Index of the first token at which two texts differ; None for equal ones."""
    both = min(len(plain), len(other))
    different = np.flatnonzero(plain[:both] != other[:both])
    return int(different[0]) if different.size else None if len(plain) == len(other) else both


def gaps(logits: np.ndarray) -> np.ndarray:
    """``[N]`` likeliest minus second likeliest of ``logits [N, V]``."""
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0]


def report(all_gaps: np.ndarray, parted: list[dict[str, Any]], texts: int) -> dict[str, Any]:
    """The figures of the docstring."""
    return {
        "tokens": int(all_gaps.size),
        "share_below": {str(edge): float((all_gaps < edge).mean()) for edge in EDGES},
        "texts": texts,
        "texts_that_part": len(parted),
        "widest_gap_where_texts_part": max((p["gap"] for p in parted), default=None),
        "parted": parted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-135m-instruct-dspark")
    parser.add_argument("--prompts", required=True, help="JSONL of turns, messages, prompt or prompt_ids")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out")
    args = parser.parse_args()
    try:
        asked = read_prompts(args.prompts, args.limit)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    start = environment()
    target = dspark_jax.load_target(args.target, dtype=args.dtype)
    drafter = dspark_jax.load_drafter(args.drafter, target, dtype=args.dtype)
    prompts = [p.encode(target.tokenizer) for p in asked]
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    call = partial(
        jax.jit(
            partial(
                dspark_jax.generate,
                max_new_tokens=args.max_new_tokens,
                sampling=dspark_jax.Sampling(temperature=0.0),
                stop_token_ids=stop_ids(target),
            )
        ),
        prompts=jnp.asarray(ids),
        lengths=jnp.asarray([len(p) for p in prompts], jnp.int32),
        seeds=jnp.zeros(len(prompts), jnp.uint32),
    )
    plain, fast = call(target, None), call(target, drafter)
    found: list[np.ndarray] = []
    parted: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        one = np.asarray(plain.tokens[i, : plain.lengths[i]])
        two = np.asarray(fast.tokens[i, : fast.lengths[i]])
        text = np.zeros(width + args.max_new_tokens, np.int32)  # one shape for all, one compilation
        text[: len(prompt) + len(one)] = [*prompt, *one]
        logits = np.asarray(text_logits(target, jnp.asarray(text)))[len(prompt) - 1 :][: len(one)]
        found.append(gaps(logits))
        at = first_difference(one, two)
        if at is not None and at < min(len(one), len(two)):
            gap = float(abs(logits[at, one[at]] - logits[at, two[at]]))
            parted.append({"prompt": i, "at": at, "tokens": [int(one[at]), int(two[at])], "gap": gap})
    write(args.out, {**start, "dtype": args.dtype, **report(np.concatenate(found), parted, len(prompts))})


if __name__ == "__main__":
    main()
