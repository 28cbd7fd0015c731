"""Accepted lengths of drafters side by side.

    python scripts/evaluate.py --config configs/evaluate/smollm2.toml --out runs/eval

Decodes the prompts of every set with every drafter, and without one, under the same sampling and seeds, and writes
``results.json``, ``report.md`` and PNG figures. Started again on the same folder it decodes only what is missing, so
that a drafter or a set may be added later. ``--set decode.max_new_tokens=64`` overrides a setting; lists are given
whole: ``--set 'drafters=[{name="mine", path="runs/first/drafter"}]'``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import jax

from dspark_jax.config_toml import load_toml
from dspark_jax.evaluate.config import EvaluateConfig
from dspark_jax.evaluate.run import Evaluation


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and report")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    try:
        Evaluation(load_toml(args.config, EvaluateConfig, args.set), args.out).run()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((args.out / "report.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
