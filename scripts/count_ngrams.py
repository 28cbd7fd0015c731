"""Counts the n-grams of token records and writes them as a drafter: the baseline beside a trained one.

    python scripts/count_ngrams.py --config configs/ngram/smollm2.toml --out runs/trigram
    python scripts/count_ngrams.py --config configs/ngram/smollm2.toml --out runs/bigram --set order=2

The folder is named like any drafter's in ``scripts/evaluate.py``, ``scripts/generate.py`` and the server. Drafts are
drawn from the interpolated law of the last tokens; ``--set successors=1`` makes each context's likeliest successor a
certain draft. Both are exact, and at temperature 0 they are one. Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

from dspark_jax.command_line import begin_logging, exit_status, folder_parser
from dspark_jax.config_toml import load_toml
from dspark_jax.data import ngrams
from dspark_jax.data.records import Records
from dspark_jax.whole_file import DiskFull, full_disk_stops


@dataclasses.dataclass(frozen=True)
class CountConfig:
    """Everything that decides the tables but their folder.

    Attributes:
        records: a folder of ``scripts/prepare_data.py``.
        order: 2 or 3. successors: kept of a context. block_size: drafts a block by default.
        least: a trigram context seen less often is left to the bigram.
    """

    records: Path
    order: Literal[2, 3] = 3
    successors: int = 32
    block_size: int = 7
    least: int = 2

    def __post_init__(self) -> None:
        for name in ("successors", "block_size", "least"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")


def main(argv: list[str] | None = None) -> int:
    args = folder_parser(__doc__, out="the drafter's folder").parse_args(argv)
    begin_logging(quiet=())

    def act() -> None:
        config = load_toml(args.config, CountConfig, args.set)
        records = Records(config.records)
        shape = ngrams.NgramConfig(records.meta["vocab_size"], config.order, config.successors, config.block_size)
        tables = ngrams.count(records, shape, least=config.least)
        source = {"records": len(records), "learnt_tokens": int(records.loss_mask.sum()), "least": config.least}
        with full_disk_stops(args.out):
            ngrams.save(args.out, shape, tables, source)
        contexts = 0 if tables.second is None else len(tables.second)
        print(f"{args.out}: order {config.order}, {source['learnt_tokens']} tokens, {contexts} trigram contexts")

    return exit_status(act, DiskFull)


if __name__ == "__main__":
    sys.exit(main())
