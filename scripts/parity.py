"""Writes every array that this code computes for a case of the reference, under the reference's keys.

    python scripts/parity.py CASE_DIR --out got.npz [--dtype float32]

Exit status: 0 done; 2 refused (no such case, a file of it is wrong, it is of a kind this version does not compute, or
``--out`` is no file that can be written).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from dspark_jax.command_line import exit_status
from dspark_jax.evaluate.parity import Case, compute, load_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="directory with case.json")
    parser.add_argument("--out", required=True, help="the .npz to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    args = parser.parse_args()
    if args.dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
    cases: list[Case] = []
    if status := exit_status(lambda: cases.append(load_case(args.case, args.dtype))):
        return status
    arrays = compute(cases[0])

    def save() -> None:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        with open(args.out, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        print(f"{len(arrays)} arrays written to {args.out}")

    return exit_status(save)


if __name__ == "__main__":
    sys.exit(main())
