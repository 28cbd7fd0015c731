"""Converts a drafter between DeepSpec's and speculators' layouts.

    python scripts/convert_checkpoint.py --input DIR --output DIR --to deepspec --full --target TARGET
    python scripts/convert_checkpoint.py --input DIR --output DIR --to speculators --target TARGET

``--full`` writes a plain DeepSpec directory for other engines: floats, with copies of embedding and head,
and none of our extensions; a drafter with a trimmed vocabulary is refused, since that layout has no d2t map.
``--target`` is needed where the drafter has no copies of its own. The same settings can stand in a TOML file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from dspark_jax.checkpoint.convert import LAYOUTS, convert_drafter
from dspark_jax.config_toml import load_toml
from dspark_jax.drafters import drafter_specs
from dspark_jax.load import find_drafter, load_target, resolve_dtype, target_view


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Settings of one conversion; each is also a flag.

    Attributes:
        input: the drafter: a directory, a shipped name or a cached hub id.
        output: the directory to write.
        to: ``deepspec`` or ``speculators``.
        full: a plain DeepSpec directory for other engines.
        int8: store matrices as int8 rows (our extension of DeepSpec's layout).
        target: name or path of the drafter's target; empty: none is loaded.
        dtype: ``auto`` (as stored; float32 where that is int8), ``float32`` or ``bfloat16``.
    """

    input: str = ""
    output: str = ""
    to: str = "deepspec"
    full: bool = False
    int8: bool = False
    target: str = ""
    dtype: str = "auto"


def parse(arguments: list[str] | None = None) -> ConvertConfig:
    """Settings from the TOML file, overridden by --set, overridden by flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="FILE.toml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--input", metavar="DIR")
    parser.add_argument("--output", metavar="DIR")
    parser.add_argument("--to", choices=LAYOUTS)
    parser.add_argument("--full", action="store_true", default=None)
    parser.add_argument("--int8", action="store_true", default=None)
    parser.add_argument("--target", metavar="NAME_OR_PATH")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    flags = vars(parser.parse_args(arguments))
    config = load_toml(flags.pop("config"), ConvertConfig, flags.pop("overrides"))
    config = dataclasses.replace(config, **{key: value for key, value in flags.items() if value is not None})
    missing = [key for key in ("input", "output") if not getattr(config, key)]
    if missing:
        parser.error(f"missing: {', '.join('--' + key for key in missing)}")
    return config


def main(arguments: list[str] | None = None) -> int:
    """Converts, and says where the output went. Returns the exit status."""
    try:
        config = parse(arguments)
        dtype = None if config.dtype == "auto" else resolve_dtype(config.dtype)
        # In float32 whatever the machine: its rows are only copied, and narrowed when they are written.
        view = target_view(load_target(config.target, dtype="float32")) if config.target else None
        path = convert_drafter(
            find_drafter(config.input),
            config.output,
            drafter_specs,
            to=config.to,
            full=config.full,
            quantize=config.int8,
            target=view,
            verifier=config.target or None,
            dtype=dtype,
        )
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    print(f"{config.to} drafter written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
