#!/usr/bin/env bash
# Sets up an environment (the first time only) and runs pytest. Arguments go to pytest: `scripts/test.sh -m slow`.
# DSPARK_TEST_PROCESSES (2) share the test files between them; 0 runs all in one process.
# scripts/setup_env.sh lists the environment variables (PYTHON, DSPARK_VENV, ...).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup_env.sh" test,serve
cd "$root"
exec "${DSPARK_VENV:-$root/.venv}/bin/python" -m pytest -n "${DSPARK_TEST_PROCESSES:-2}" --dist loadfile "$@"
