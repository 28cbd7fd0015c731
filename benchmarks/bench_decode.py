"""How much faster is speculative decoding of a real model than plain decoding, at batch 1?

    python benchmarks/bench_decode.py --prompts mt-bench.jsonl --limit 40 --out benchmarks/results/decode.json

Every prompt is decoded by every arm (plain, and each number of draft tokens) in one run, in rotating order. Only
decoding is timed: from a request's first token to its last. The plain arm is the engine without a drafter, on the
same fast path; the adaptive one decides each cycle from confidences and the step times it measured at its start.
Reports tokens per second, their ratio to plain (of totals, and the median over prompts), accepted
length (tokens kept a cycle, bonus included; the last cycle of a text that reached the limit is left out) and how many
texts equal the plain one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import environment, write

from dspark_jax import Engine, EngineConfig, Request, Sampling, load_drafter, load_target
from dspark_jax.data.prompts import read_prompts
from dspark_jax.targets import stop_ids


@dataclasses.dataclass
class Arm:
    """One engine and what it did."""

    name: str
    engine: Engine
    seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)

    def decode(self, request: Request) -> None:
        """One request from start to end."""
        self.engine.submit(request)
        text: list[int] = []
        cycles: list[int] = []
        begin = None
        reason = None
        while self.engine.has_work():
            for event in self.engine.step():
                text += event.tokens
                cycles += event.committed
                reason = event.finish_reason or reason
                if begin is None and text:
                    begin, already = time.perf_counter(), len(text)
        self.seconds.append(time.perf_counter() - begin)
        self.tokens.append(len(text) - already)
        self.texts.append(text)
        self.committed += cycles[:-1] if reason == "length" else cycles


def build_arms(args: argparse.Namespace, target: Any, drafter: Any) -> list[Arm]:
    """Plain first, then one arm for each number of draft tokens, then the adaptive one."""
    shared = {"max_num_seqs": 1, "max_model_len": args.max_model_len, "overlap": False}
    arms = [Arm("plain", Engine(target, None, EngineConfig(mode="none", **shared)))]
    for k in map(int, args.drafts.split(",")):
        config = EngineConfig(mode="fixed", num_speculative_tokens=k, **shared)
        arms.append(Arm(f"{k} drafts", Engine(target, drafter, config)))
    arms.append(Arm("adaptive", Engine(target, drafter, EngineConfig(mode="lagged", **shared))))
    for arm in arms:
        arm.engine.warmup()
        print(f"{arm.name}: ready, mode {arm.engine.mode}", flush=True)
    return arms


def row(arm: Arm, plain: Arm) -> dict[str, Any]:
    """The line of a result table."""
    speed = sum(arm.tokens) / sum(arm.seconds)
    pairs = [
        (n / s) / (pn / ps) for n, s, pn, ps in zip(arm.tokens, arm.seconds, plain.tokens, plain.seconds, strict=True)
    ]
    return {
        "arm": arm.name,
        "tokens_per_s": round(speed, 2),
        "ratio_to_plain": round(speed / (sum(plain.tokens) / sum(plain.seconds)), 3),
        "median_ratio": round(median(pairs), 3),
        "accepted_length": round(float(np.mean(arm.committed)), 3),
        "texts_equal_to_plain": sum(a == b for a, b in zip(arm.texts, plain.texts, strict=True)),
        "texts": len(arm.texts),
        "tokens": sum(map(len, arm.texts)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="smollm2-135m-instruct-dspark")
    parser.add_argument("--prompts", required=True, help="JSONL with `turns`")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--drafts", default="1,2,3,5,7")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", default="rejection")
    parser.add_argument("--out")
    args = parser.parse_args()
    start = environment()
    target = load_target(args.target)
    arms = build_arms(args, target, load_drafter(args.drafter, target))
    for i, prompt in enumerate(read_prompts(args.prompts, args.limit)):
        request = Request(
            prompt_ids=prompt.encode(target.tokenizer),
            max_new_tokens=args.max_new_tokens,
            sampling=Sampling(temperature=args.temperature),
            seed=i,
            verification=args.verification,
            stop_token_ids=stop_ids(target),
        )
        for j in range(len(arms)):
            arms[(i + j) % len(arms)].decode(request)
        result = {**start, "temperature": args.temperature, "arms": [row(arm, arms[0]) for arm in arms]}
        print(f"prompt {i + 1}: " + ", ".join(f"{a.name} {a.tokens[-1] / a.seconds[-1]:.1f}" for a in arms), flush=True)
        if args.out:  # what is there so far survives an interruption
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    write(args.out, result)


if __name__ == "__main__":
    main()
