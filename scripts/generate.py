"""Generates from one prompt or many, with or without a drafter. Each prompt is decoded alone, with the same seed.

    python scripts/generate.py --model smollm2-135m-instruct --drafter smollm2-135m-instruct-dspark \\
        --chat --prompt "Name three rivers." --max-new-tokens 64 --temperature 0

Text is continued as it stands; ``--chat`` puts it into the model's chat template as the user's message. A line of
``--prompts`` holds ``prompt`` (text), ``turns`` (a list of user messages, of which the first is used) or
``messages`` (a chat, always put into the template). Text ends at the model's own end-of-text tokens, token ids only
at ``--stop-token-ids``, which replaces them in both cases. ``--json`` prints one object a prompt: output_ids, text
(null without a tokenizer), committed (tokens of each cycle), offered (drafts verified in each cycle), seconds
(decoding, compilation not included).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import Sampling, generate, load_drafter, load_target
from dspark_jax.command_line import exit_status
from dspark_jax.engine import Request
from dspark_jax.engine.request import Checked, check
from dspark_jax.load import check_drafter
from dspark_jax.targets import stop_ids

PAD_TO = 64
"""Prompts are padded to multiples of it, so that prompts of similar length share a compilation."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="target: directory, .gguf file, cached hub id or embedded name")
    add("--drafter", help="drafter: directory, cached hub id or shipped name; none: plain decoding")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompt-ids", metavar='"1 2 3"', type=token_ids)
    source.add_argument("--prompts", metavar="FILE.jsonl", type=Path)
    add("--chat", action="store_true", help="put text into the chat template")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of every prompt, in [0, 2^32)")
    add("--method", choices=("auto", "none"), default="auto", help="none: plain decoding, whatever the drafter")
    add("--verification", choices=("rejection", "coupled"), default="rejection")
    add("--num-speculative-tokens", type=int, metavar="K", help="drafts a block (the drafter's block)")
    add("--confidence-threshold", type=float, default=0.0, help="cut drafts before the first one below it; 0: never")
    add("--stop-token-ids", metavar='"2 7"', type=token_ids)
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float64")
    add("--json", action="store_true", help="one JSON object a prompt")
    return parser.parse_args(argv)


def token_ids(text: str) -> list[int]:
    """``"1 2 3"`` (commas are fine too)."""
    return [int(part) for part in text.replace(",", " ").split()]


def prompts(args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[list[int], bool]]:
    """(token ids, came as text) of every prompt."""
    if args.prompt_ids is not None:
        yield args.prompt_ids, False
        return
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer: give --prompt-ids")
    for record in [{"prompt": args.prompt}] if args.prompt is not None else records(args.prompts):
        messages = record.get("messages")
        text = record["turns"][0] if "turns" in record else record.get("prompt")
        if messages is None and args.chat:
            messages = [{"role": "user", "content": text}]
        if messages is None:
            yield tokenizer(text)["input_ids"], True
        else:
            try:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template is a program: it may raise anything about its input
                raise ValueError(f"the chat template refuses {json.dumps(messages)[:80]}: {error}") from error
            yield ids, True


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, each with one of the three keys."""
    kinds = {"prompt": "a string", "turns": "a list of strings", "messages": "a list of {role, content} strings"}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path}: {error}") from None
    if not any(map(str.strip, lines)):
        raise ValueError(f"--prompts {path}: no prompts in it")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error})") from None
        if not isinstance(record, dict) or not any(record.get(key) for key in ("prompt", "turns", "messages")):
            raise ValueError(f"{path}:{number}: an object with prompt, turns or messages expected")
        for key, wanted in kinds.items():
            if not _fits(key, record.get(key)):
                raise ValueError(f"{path}:{number}: {key} must be {wanted}, found {json.dumps(record[key])[:80]}")
        yield record


def _fits(key: str, value: Any) -> bool:
    """``value`` is what a record may have under ``key``, absent included."""
    if value is None:
        return True
    if key == "prompt":
        return isinstance(value, str)
    if not isinstance(value, list):
        return False
    if key == "turns":
        return all(isinstance(turn, str) for turn in value)
    return all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


class Generator:
    """``generate`` for one prompt at a time, compiled once for each padded length."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        for name in ("num_speculative_tokens", "confidence_threshold"):
            if getattr(args, name) and args.drafter is None:
                raise ValueError(f"--{name.replace('_', '-')} is about drafts: it needs --drafter")
        if args.drafter is not None and args.method != "none":
            check_drafter(args.drafter)
        self.target = load_target(args.model, dtype=args.dtype)
        self.drafter = None
        if args.drafter is not None and args.method != "none":
            self.drafter = load_drafter(args.drafter, self.target, dtype=args.dtype)
        self.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
        self.eos = list(stop_ids(self.target))
        self._compiled: dict[tuple[int, int, tuple[int, ...]], Any] = {}

    def check(self, ids: list[int], is_text: bool) -> Checked:
        """Refuses bad input by name; the limit is cut to the window."""
        stops = self.args.stop_token_ids
        stops = (self.eos if is_text else []) if stops is None else stops
        request = Request(ids, self.args.max_new_tokens, self.sampling, self.args.seed, None, stops)
        target = self.target
        return check(
            request,
            window=target.max_positions,
            vocab_size=target.vocab_size,
            verification=self.args.verification,
            max_stops=max(len(stops), 1),
        )

    def __call__(self, ids: list[int], is_text: bool) -> dict[str, Any]:
        """The record of one prompt."""
        request = self.check(ids, is_text)
        width = -(-len(request.prompt) // PAD_TO) * PAD_TO
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(request.prompt)] = request.prompt
        inputs = (self.target, self.drafter, jnp.asarray(padded), jnp.asarray([len(request.prompt)], jnp.int32))
        seeds = jnp.asarray([request.seed], jnp.uint32)
        key = (width, request.limit, request.stop_ids)
        if key not in self._compiled:
            self._compiled[key] = self._jitted(request).lower(*inputs, seeds=seeds).compile()
        begin = time.perf_counter()
        out = jax.block_until_ready(self._compiled[key](*inputs, seeds=seeds))
        seconds = time.perf_counter() - begin
        tokens = out.tokens[0, : int(out.lengths[0])].tolist()
        if len(tokens) < request.limit and not (tokens and tokens[-1] in request.stop_ids):
            raise ValueError(
                f"{self.args.model}: NaN or infinite logits after {len(tokens)} tokens: damaged weights, or numbers "
                f"too large for {self.target.dtype} on this prompt (try --dtype float32)"
            )
        cycles = int((np.asarray(out.committed[0]) > 0).sum())
        tokenizer = self.target.tokenizer
        return {
            "output_ids": tokens,
            "text": None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True),
            "committed": out.committed[0, :cycles].tolist(),
            "offered": out.offered[0, :cycles].tolist(),
            "seconds": round(seconds, 4),
        }

    def _jitted(self, request: Checked) -> Any:
        args = self.args
        threshold = args.confidence_threshold if self.drafter is not None else 0.0
        options: dict[str, Any] = {}
        if threshold:
            options = {"admit": "threshold", "confidence_threshold": threshold}
        return jax.jit(
            partial(
                generate,
                max_new_tokens=request.limit,
                sampling=self.sampling,
                verification=args.verification,
                num_speculative_tokens=args.num_speculative_tokens if self.drafter is not None else None,
                stop_token_ids=request.stop_ids,
                **options,
            )
        )


def show(record: dict[str, Any], as_json: bool) -> None:
    """Text and numbers for people, or one line of JSON."""
    if as_json:
        print(json.dumps(record), flush=True)
        return
    print(record["output_ids"] if record["text"] is None else record["text"], flush=True)
    cycles, made = len(record["committed"]), len(record["output_ids"])
    mean = sum(record["committed"]) / cycles if cycles else 0.0
    speed = made / record["seconds"] if record["seconds"] else 0.0
    print(
        f"[{made} tokens in {record['seconds']:.2f} s, {speed:.1f} tokens/s, {mean:.2f} tokens a cycle]",
        file=sys.stderr,
    )


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)

    def act() -> None:
        generator = Generator(args)
        for ids, is_text in prompts(args, generator.target.tokenizer):
            show(generator(ids, is_text), args.json)

    return exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
