#!/usr/bin/env bash
# Sets up an environment (the first time only) and serves. Arguments go to `python -m dspark_jax.serve`; with none it
# serves the embedded model with its drafter on http://127.0.0.1:8000. scripts/setup_env.sh lists the environment
# variables (PYTHON, DSPARK_VENV, ...).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup_env.sh" demo
exec "${DSPARK_VENV:-$root/.venv}/bin/python" -m dspark_jax.serve "$@"
