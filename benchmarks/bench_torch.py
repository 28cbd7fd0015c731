"""How fast is plain decoding next to transformers with torch, on the same weights and this machine?

    python benchmarks/bench_torch.py --out benchmarks/results/torch.json          (needs the extra `torch`)

SmolLM2-135M in float32, batch 1, greedy. Both decode the same prompts in turn, in one process; a whole
``generate`` call is timed, prefill included, after one that is not counted. torch runs with one thread and with all,
and the faster of the two counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import jax.numpy as jnp
import numpy as np
import torch
from report import environment, write

from dspark_jax import Sampling, generate, load_target
from dspark_jax.evaluate.torch_reference import torch_llama

PROMPTS = (
    "Give me three tips for sleeping better.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "What is the difference between a list and a tuple in Python?",
    "Describe the city of Lisbon to a traveller.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    target = load_target("smollm2-135m-instruct", dtype="float32")
    model = torch_llama("smollm2-135m-instruct")
    tokenizer = target.tokenizer
    longest = 64

    def ours(ids: list[int]) -> int:
        prompts = jnp.zeros((1, longest), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids))
        out = generate(
            target,
            None,
            prompts,
            jnp.asarray([len(ids)]),
            seeds=jnp.zeros(1, jnp.uint32),
            max_new_tokens=args.new_tokens,
            sampling=Sampling(temperature=0.0),
        )
        return int(np.asarray(out.lengths)[0])

    def theirs(threads: int) -> Callable[[list[int]], int]:
        def run(ids: list[int]) -> int:
            torch.set_num_threads(threads)
            n = args.new_tokens
            with torch.inference_mode():
                out = model.generate(torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False)
            return out.shape[1] - len(ids)

        return run

    arms = {"dspark_jax": ours, "torch, 1 thread": theirs(1), "torch, all threads": theirs(os.cpu_count() or 1)}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for i, prompt in enumerate((PROMPTS[0], *PROMPTS)):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for name, run in arms.items():
            begin = time.perf_counter()
            tokens = run(ids)
            if i:  # the first round compiles
                speeds[name].append(tokens / (time.perf_counter() - begin))
    best = max(median(speeds[name]) for name in arms if name.startswith("torch"))
    write(
        args.out,
        {
            **start,
            "torch": torch.__version__,
            "new_tokens": args.new_tokens,
            "tokens_per_s": {name: round(median(values), 2) for name, values in speeds.items()},
            "ratio_to_faster_torch": round(median(speeds["dspark_jax"]) / best, 2),
        },
    )


if __name__ == "__main__":
    main()
