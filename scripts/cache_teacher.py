"""Caches what the target says about training text, so that a run, or many, need not ask it again.

    python scripts/cache_teacher.py --config configs/train/smollm2_dspark.toml --out runs/teacher --records 2000
    python scripts/train.py --config configs/train/smollm2_dspark.toml --out runs/first --set data.teacher_cache=runs/teacher

Last hidden state and tapped layers in float16, no logits: of SmolLM2 with five taps 7 kB a token. It pays where one
text serves several runs; a single run over fresh text asks the target online. Started again, it makes what is missing
or damaged. Exit status: 0 done, 2 refused, 3 no room on the disk (what is written is whole).
"""  # noqa: E501 - a command line

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import jax

from dspark_jax import load_target
from dspark_jax.config_toml import load_toml
from dspark_jax.train.cached_teacher import build
from dspark_jax.train.config import TrainConfig
from dspark_jax.train.folder import is_disk_full


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="of the training run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the states")
    parser.add_argument("--records", type=int, default=0, help="of the first so many records a run reads; 0: all")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    try:
        config = load_toml(args.config, TrainConfig, args.set)
        count = build(config, load_target(config.target), args.out, args.records)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"stopped: {args.out}: no space left on the disk; make room and start again", file=sys.stderr)
        return 3
    print(f"{args.out}: teacher states of {count} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
