"""Makes training data: ``OUT/train`` and ``OUT/heldout`` (no shared conversation) of token records.

    python scripts/prepare_data.py --out runs/data                                    ShareGPT's own answers
    python scripts/prepare_data.py --config configs/data/smollm2.toml --out runs/own  answers of the target itself

Repeated questions and those of evaluation sets (``keep_away``) are left out. Regenerated answers are written as they
come; started again on the same folder, it goes on. Conversations are answered turn by turn with ``--set turns=3``.
Exit status: 0 done, 2 refused, 3 no room on the disk.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import jax

from dspark_jax import load_target
from dspark_jax.config_toml import load_toml
from dspark_jax.train.folder import DiskFull
from dspark_jax.train.prepare import PrepareConfig, prepare


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="TOML; without it the defaults")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="overrides one setting")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(args.out.absolute() / "compiled"))
    try:
        config = load_toml(args.config, PrepareConfig, args.set)
        counts = prepare(config, load_target(config.target), args.out)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DiskFull as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 3
    print(", ".join(f"{args.out / name}: {count} records" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
