"""What a target with int8 layers costs in accuracy and saves in memory: logits against the full weights, and the
length that the shipped drafter's blocks are accepted to.

    python benchmarks/bench_int8.py --prompts 16 --tokens 48 --out benchmarks/results/int8_smollm2.json

Logits are compared over the texts that the full target writes (greedy), so both targets read the same tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import environment, write

import dspark_jax
from dspark_jax import Sampling, generate
from dspark_jax.layout import dense_layout
from dspark_jax.targets import stop_ids

TARGET, DRAFTER = "smollm2-135m-instruct", "smollm2-135m-instruct-dspark"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a robot that learns to paint.",
    "Explain how photosynthesis works to a ten-year-old.",
    "List five tips for sleeping better.",
    "A train travels 60 km in 45 minutes. What is its average speed in km per hour?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "What are the differences between a virus and a bacterium?",
)


def prompts(tokenizer: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Chat prompts, right-padded, and their lengths."""
    rows = []
    for i in range(count):
        chat = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
        rows.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    padded = np.zeros((count, max(map(len, rows))), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, np.array([len(ids) for ids in rows], np.int32)


def accepted_length(out: Any, limit: int) -> float:
    """Tokens a cycle, the last cycle of rows that reached the limit left out (DESIGN section 9)."""
    committed, lengths = np.asarray(out.committed), np.asarray(out.lengths)
    tokens = cycles = 0
    for row, length in zip(committed, lengths, strict=True):
        kept = row[row > 0]
        kept = kept[:-1] if length == limit else kept
        tokens, cycles = tokens + int(kept.sum()), cycles + len(kept)
    return tokens / cycles


@jax.jit
def log_probs(target: Any, tokens: jax.Array) -> jax.Array:
    """``[B, L, V]`` log-probabilities behind every token."""
    rows, length = tokens.shape
    layout = dense_layout(jnp.zeros(rows, jnp.int32), jnp.full(rows, length), length)
    hidden, _, _ = target.forward(tokens.reshape(-1), layout, target.init_cache(rows, length))
    return jax.nn.log_softmax(target.unembed(hidden).reshape(rows, length, -1), axis=-1)


def logit_error(full: Any, small: Any, texts: np.ndarray, counted: np.ndarray) -> dict[str, float]:
    """Over the places ``counted [B, L]``: how far log-probabilities, distributions and arg-maxes are apart."""
    errors, divergence, agree, distance = [], [], [], []
    for row, places in zip(texts, counted, strict=True):
        p, q = (np.asarray(log_probs(t, jnp.asarray(row[None])))[0][places] for t in (full, small))
        likely = np.exp(p)
        errors.append(np.abs(np.where(likely > 1e-4, p - q, 0)).max(axis=-1))
        divergence.append(np.sum(likely * (p - q), axis=-1))
        distance.append(0.5 * np.abs(likely - np.exp(q)).sum(axis=-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    return {
        "places": int(counted.sum()),
        "largest_log_probability_error_of_tokens_above_1e-4": float(np.concatenate(errors).max()),
        "mean_of_each_place's_largest": float(np.concatenate(errors).mean()),
        "mean_kl_nats": float(np.concatenate(divergence).mean()),
        "mean_total_variation": float(np.concatenate(distance).mean()),
        "same_arg_max": float(np.concatenate(agree).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    targets = {q or "full": dspark_jax.load_target(TARGET, quantization=q) for q in (None, "int8")}
    ids, lengths = prompts(targets["full"].tokenizer, args.prompts)
    rows: list[dict[str, Any]] = []
    texts: dict[str, Any] = {}
    for name, target in targets.items():
        drafter = dspark_jax.load_drafter(DRAFTER, target)
        row: dict[str, Any] = {
            "target": name,
            "dtype": str(target.dtype),
            "layer_bytes": sum(x.nbytes for x in jax.tree.leaves(target.params["layers"])),
            "all_bytes": sum(x.nbytes for x in jax.tree.leaves(target.params)),
        }
        for temperature in (0.0, 1.0):
            out = generate(
                target, drafter, ids, lengths, seeds=np.arange(args.prompts, dtype=np.uint32),
                max_new_tokens=args.tokens, sampling=Sampling(temperature), stop_token_ids=stop_ids(target),
            )  # fmt: skip
            row[f"accepted_length_at_temperature_{temperature:g}"] = round(accepted_length(out, args.tokens), 3)
            texts.setdefault(name, out)
        print(row, flush=True)
        rows.append(row)
    made = np.asarray(texts["full"].tokens)
    whole = np.zeros((args.prompts, ids.shape[1] + args.tokens), np.int32)
    counted = np.zeros(whole.shape, bool)
    for row_ids, places, prompt, length, text in zip(whole, counted, ids, lengths, made, strict=True):
        kept = text[text >= 0]
        row_ids[:length], row_ids[length : length + len(kept)] = prompt[:length], kept
        places[length - 1 : length + len(kept) - 1] = True
    error = logit_error(targets["full"], targets["int8"], whole, counted)
    print(error)
    write(args.out, {**start, "target": TARGET, "drafter": DRAFTER, "prompts": args.prompts, "tokens": args.tokens,
                     "rows": rows, "int8_against_full": error})  # fmt: skip


if __name__ == "__main__":
    main()
