#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, on a machine with one and only JAX, flax, optax, orbax, numpy,
# transformers and pytest installed.
#
#   scripts/gpu_check.sh --quick [--out DIR]     under 3 minutes: pytest -m gpu, milliseconds of the cycle
#
# Every part survives the failure of the others; the last thing printed is one table. Results go to DIR
# (default: runs/gpu_check).
set -uo pipefail
cd "$(dirname "$0")/.."

out=runs/gpu_check
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) ;;  # the only extent so far
    --out) out=${2:?--out needs a directory}; shift ;;
    *) echo "gpu_check.sh: unknown argument '$1' (known: --quick, --out DIR)" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out"
python=${PYTHON:-python3}
shape=${DSPARK_GPU_CHECK_SHAPE:-qwen3-0.6b}  # tiny tries the script itself on a CPU
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 DSPARK_TEST_PLATFORM=default
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/compiled}

failed=0
table=()
part() {  # part NAME LIMIT_SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS rc
  shift 2
  echo "== $name"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.log"
  rc=${PIPESTATUS[0]}
  [ "$rc" = 0 ] || failed=1
  table+=("$(printf '%-10s %-22s %4d s' "$name" "$([ "$rc" = 0 ] && echo ok || echo "failed, status $rc")" $((SECONDS - begin)))")
}

"$python" -c 'import jax; print("jax", jax.__version__, jax.devices())' || failed=1
part tests 90 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider
part cycle 80 "$python" benchmarks/bench_cycle.py --shape "$shape" --batch 1,8,32 --repeats 3 --out "$out/cycle.json"

echo
echo "== summary"
printf '%s\n' "${table[@]}"
"$python" - "$out/cycle.json" <<'PY' || true
import json, sys
try:
    result = json.load(open(sys.argv[1]))
except OSError:
    sys.exit("no cycle figures")
print(result["device"], result["shape"], result["dtype"], "commit", result["commit"])
columns = list(result["rows"][0])
print(" | ".join(columns))
for row in result["rows"]:
    print(" | ".join(str(row[c]) for c in columns))
PY
exit $failed
