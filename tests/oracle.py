"""Where the reference numbers (oracle/README) are: DSPARK_ORACLE, else beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def oracle_dir() -> Path:
    """The folder of the oracle; skips the calling test where there is none.

    DSPARK_ORACLE set to a folder that does not exist is an error: who names one wants it used.
    """
    named = os.environ.get("DSPARK_ORACLE")
    if named:
        if not Path(named).is_dir():
            raise FileNotFoundError(f"DSPARK_ORACLE={named} is not a folder")
        return Path(named)
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "oracle"
    if not beside.is_dir():
        pytest.skip(f"no oracle: DSPARK_ORACLE is not set and {beside} does not exist")
    return beside
