"""Is the engine of one checkout as fast as that of another? Tokens per second of the embedded model, side by side.

    git worktree add ../before COMMIT
    python benchmarks/bench_engine_versions.py --before ../before --rounds 9 --out versions.json

Each checkout runs in a process of its own, which loads the model and compiles once. Then the two decode the same
prompts in turns, the first one of a round alternating, while the other one waits. Greedy texts of a fixed length, so
that both do the same work; timed from the moment at which every request has its first token. Reports the ratio of the
medians (after / before) for every mode, the ratios of single rounds, and whether the texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFTER = "smollm2-135m-instruct", "smollm2-135m-instruct-dspark"
QUESTIONS = (
    "Give me three tips for sleeping better.",
    "Write a Python function that reverses a list.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
)


def worker(args: argparse.Namespace) -> None:
    """Of one checkout: says where its code lies, then decodes a round for every line that it reads."""
    import dspark_jax
    from dspark_jax import Engine, EngineConfig, Request, Sampling, load_drafter, load_target

    target = load_target(TARGET)
    drafter = load_drafter(DRAFTER, target)
    engines = {}
    for mode in args.modes.split(","):
        config = EngineConfig(
            mode=mode, max_num_seqs=args.batch, max_model_len=512, num_speculative_tokens=args.drafts, profile_dir=""
        )
        engines[mode] = Engine(target, None if mode == "none" else drafter, config)
        engines[mode].warmup()
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}], add_generation_prompt=True, return_dict=False
        )
        for i in range(args.batch)
    ]

    def decode(engine: Any) -> dict[str, Any]:
        greedy = Sampling(temperature=0.0)
        ids = [engine.submit(Request(prompt, args.max_new_tokens, greedy)) for prompt in prompts]
        texts: dict[int, list[int]] = {i: [] for i in ids}
        begin, already = 0.0, 0
        while engine.has_work():
            for event in engine.step():
                texts[event.id] += event.tokens
            if not begin and all(texts.values()):
                begin, already = time.perf_counter(), sum(map(len, texts.values()))
        seconds = time.perf_counter() - begin
        return {
            "tokens_per_s": (sum(map(len, texts.values())) - already) / seconds,
            "texts": [texts[i] for i in ids],
        }

    print(json.dumps({"code": str(Path(dspark_jax.__file__).resolve().parents[1])}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({mode: decode(engine) for mode, engine in engines.items()}), flush=True)


class Checkout:
    """A checkout's process."""

    def __init__(self, tree: Path, arguments: list[str]) -> None:
        self.tree = tree.resolve()
        if not (self.tree / "dspark_jax" / "__init__.py").is_file():
            raise ValueError(f"{tree}: no checkout of this project (it has no dspark_jax/)")
        path = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", *arguments]
        self._process = subprocess.Popen(
            command, cwd=self.tree, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ready(self) -> None:
        """Waits until everything is compiled."""
        code = self._answer()["code"]
        if code != str(self.tree):
            raise RuntimeError(f"{self.tree}: its process imports dspark_jax from {code}")

    def round(self) -> dict[str, Any]:
        """One round of every mode."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def commit(self) -> str:
        """Its commit, with a + where it has changes."""
        git = ["git", "-C", str(self.tree)]
        head, changes = (
            subprocess.run([*git, *what], capture_output=True, text=True).stdout.strip()
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
        return head + ("+" if changes else "")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print, too
                return json.loads(line)
        raise RuntimeError(f"{self.tree}: its process ended with status {self._process.wait()}")


def compare(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """The figures of every mode from rounds of ``(before, after)``."""
    figures = {}
    for mode in rounds[0][0]:
        before, after = ([pair[i][mode]["tokens_per_s"] for pair in rounds] for i in range(2))
        figures[mode] = {
            "before_tokens_per_s": round(median(before), 2),
            "after_tokens_per_s": round(median(after), 2),
            "ratio_of_medians": round(median(after) / median(before), 4),
            "ratios_of_rounds": sorted(round(b / a, 4) for a, b in zip(before, after, strict=True)),
            "texts_equal": all(a[mode]["texts"] == b[mode]["texts"] for a, b in rounds),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the checkout to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="the checkout in question (this one)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--modes", default="none,fixed", help="of the engine: none, fixed, lagged, ...")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    if args.before is None or args.rounds < 1:
        parser.error("--before CHECKOUT and --rounds of at least 1 are needed")
    from report import environment, write

    start = environment()
    arguments = [
        f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("modes", "drafts", "batch", "max_new_tokens")
    ]
    checkouts: list[Checkout] = []
    try:
        for tree in (args.before, args.after):  # one after the other: they would compile on each other's cores
            checkouts.append(Checkout(tree, arguments))
            checkouts[-1].ready()
        rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for number in range(args.rounds + 1):  # the first one warms up
            order = (0, 1) if number % 2 else (1, 0)
            seen = {i: checkouts[i].round() for i in order}
            if number:
                rounds.append((seen[0], seen[1]))
                print(f"round {number}: {compare(rounds[-1:])}", file=sys.stderr, flush=True)
        commits = {name: checkout.commit() for name, checkout in zip(("before", "after"), checkouts, strict=True)}
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for checkout in checkouts:
            checkout.close()
    write(args.out, {**start, "commits": commits, "batch": args.batch, "rounds": args.rounds, "modes": compare(rounds)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
