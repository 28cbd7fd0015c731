#!/usr/bin/env bash
# Sets up an environment (the first time only) and runs pytest. Arguments go to pytest: `scripts/test.sh -m slow`.
# Test files are shared out to DSPARK_TEST_WORKERS processes (default 2; 0: one process, as with `-n 0`).
# scripts/setup_env.sh lists the environment variables (PYTHON, DSPARK_VENV, ...).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup_env.sh" test,serve
cd "$root"
exec "${DSPARK_VENV:-$root/.venv}/bin/python" -m pytest -n "${DSPARK_TEST_WORKERS:-2}" --dist loadfile "$@"
