#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, on a machine with one and only JAX, flax, optax, orbax, numpy,
# transformers and pytest installed.
#
#   scripts/gpu_check.sh --quick [--out DIR]                  under 3 minutes: pytest -m gpu, milliseconds of the cycle
#   scripts/gpu_check.sh --full [--model DIR] [--out DIR]     under 9 minutes: all of it (below)
#   scripts/gpu_check.sh --pack DIR [--text RECORDS --heldout RECORDS] [--prompts FILE.jsonl]
#                                                             on a machine that has the embedded model: what --model needs
#
# --full: pytest -m gpu; kernels against XLA and the roofline; the cycle with and without CUDA graphs; step times, and the adaptive scheduler against fixed
# blocks, on a random Qwen3-4B (layers by scan, 8 programs an engine, scripted acceptance); the cycle, and the load
# benchmark, on the embedded model; and in what time is left the shipped drafter is trained further, behind the text that
# it has seen, in bfloat16, its learning rate decayed at the end (scripts/train_within.py). DIR of --model holds the GGUF
# file in three parts of under 35 MB (they reach such a machine one at a time), which are joined here and read by our own
# block decoders, text to train on and held-out text as uint16 ids, and prompts. --text must be the data that the shipped
# drafter was trained on. A part whose files are missing is skipped and says so.
#
# Every part survives the failure of the others; the last thing printed is one table. Results go to DIR of --out
# (default: runs/gpu_check), the trained drafter in files under 16 MB. --dry tries the script itself: tiny shapes, CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS

out=runs/gpu_check extent=quick model='' pack='' text='' heldout='' prompts='' dry=0 total=${DSPARK_GPU_CHECK_SECONDS:-520}
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) extent=quick ;;
    --full) extent=full ;;
    --dry) dry=1 ;;
    --out) out=${2:?--out needs a directory}; shift ;;
    --model) model=${2:?--model needs a directory}; shift ;;
    --pack) pack=${2:?--pack needs a directory}; shift ;;
    --text) text=${2:?--text needs a folder of token records}; shift ;;
    --heldout) heldout=${2:?--heldout needs a folder of token records}; shift ;;
    --prompts) prompts=${2:?--prompts needs a file}; shift ;;
    *) echo "gpu_check.sh: unknown argument '$1' (known: --quick --full --dry --out --model --pack --text --heldout --prompts)" >&2
       exit 2 ;;
  esac
  shift
done
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if [ -n "$pack" ]; then
  set -e
  if [ -n "$text" ] && [ -z "$heldout" ]; then
    echo "gpu_check.sh: --text needs --heldout, records that are not trained on" >&2
    exit 2
  fi
  mkdir -p "$pack"
  gguf=$("$python" -c 'from dspark_jax.targets.embedded import find_embedded as f; print(f("smollm2-135m-instruct"))')
  rm -f "$pack"/target.gguf.part-?
  split -n 3 -a 1 --numeric-suffixes=1 "$gguf" "$pack/target.gguf.part-"
  sha256sum < "$gguf" | cut -d' ' -f1 > "$pack/target.gguf.sha256"
  if [ -n "$text" ]; then
    mkdir -p "$pack/text" "$pack/heldout"
    cp "$text"/{tokens.bin,mask.bin,offsets.npy,meta.json} "$pack/text/"
    cp "$heldout"/{tokens.bin,mask.bin,offsets.npy,meta.json} "$pack/heldout/"
  fi
  if [ -n "$prompts" ]; then head -n 200 "$prompts" > "$pack/prompts.jsonl"; fi
  large=$(find "$pack" -type f -size +35000000c)
  if [ -n "$large" ]; then echo "gpu_check.sh: over 35 MB: $large" >&2; exit 1; fi
  ls -l "$pack"
  exit 0
fi

mkdir -p "$out"
shape=${DSPARK_GPU_CHECK_SHAPE:-qwen3-0.6b} large_shape=qwen3-4b kernel_shape=qwen3-8b seconds=7 users=1,8,32 slots=32
load_seconds=5 embedded_limit=110 train_limit=600 train_extra=''
embedded=(--concurrency 1,16 --fixed 3,7 --max-programs 12)
repeats=(--repeats 5 --inner 20)
export DSPARK_TEST_PLATFORM=default
if [ "$dry" = 1 ]; then
  shape=tiny large_shape=tiny kernel_shape=tiny seconds=1 users=1,2 slots=2 load_seconds=1
  embedded=(--concurrency 1 --fixed 3 --max-programs 8)
  # A CPU compiles and runs the embedded model slowly; there is no lease to keep to.
  total=${DSPARK_GPU_CHECK_SECONDS:-900} embedded_limit=300 train_limit=240
  # Steps of half a second instead of fifteen.
  train_extra="--probe 5 --set data.batch=1 --set data.length=192 --set data.least_learnt=64 --set data.anchors=24"
  train_extra+=" --set data.rounds=2 --set data.heldout_batches=1 --set data.heldout_anchors=24"
  repeats=(--repeats 1 --inner 1)
  export JAX_PLATFORMS=cpu DSPARK_TEST_PLATFORM=cpu
fi
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/compiled}

failed=0
table=()
left() { echo $((total - (SECONDS - start))); }
row() { table+=("$(printf '%-10s %-34s %4d s' "$1" "$2" "$3")"); }
skip() { echo "== $1: skipped, $2"; row "$1" "skipped: $2" 0; }
part() {  # part NAME LIMIT_SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS rc
  shift 2
  if [ "$(left)" -lt 15 ]; then skip "$name" "no time left"; return; fi
  if [ "$limit" -gt "$(left)" ]; then limit=$(left); fi
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  rc=${PIPESTATUS[0]}
  # pytest says 5 where every test was left out
  if [ "$rc" != 0 ] && ! { [ "$dry" = 1 ] && [ "$name" = tests ] && [ "$rc" = 5 ]; }; then failed=1; fi
  case "$rc" in 0) row "$name" ok $((SECONDS - begin)) ;; 124) row "$name" "stopped after $limit s" $((SECONDS - begin)) ;;
    *) row "$name" "failed, status $rc" $((SECONDS - begin)) ;; esac
}

join_model() {  # the embedded target, from its three parts
  local whole=$out/target.gguf
  cat "$model"/target.gguf.part-1 "$model"/target.gguf.part-2 "$model"/target.gguf.part-3 > "$whole" || return 1
  [ "$(sha256sum < "$whole" | cut -d' ' -f1)" = "$(cat "$model/target.gguf.sha256")" ] ||
    { echo "the joined file is not the one that was packed"; return 1; }
  "$python" -c 'import dspark_jax as d; t = d.load_target("smollm2-135m-instruct"); print(t.name, t.dtype)'
}

train() {  # as long as there is time; what comes of it leaves in files under 16 MB
  local run=$out/train rc=0
  rm -rf "$run"
  # shellcheck disable=SC2086 # several words
  "$python" scripts/train_within.py --seconds "$train_seconds" --config configs/train/smollm2_dspark.toml --out "$run" \
    --start-from smollm2-135m-instruct-dspark --set "data.train=$model/text" --set "data.heldout=$model/heldout" \
    --set loss.bfloat16=true $train_extra || rc=$?
  if [ ! -f "$run/drafter/model.safetensors" ]; then return $((rc ? rc : 1)); fi
  cp "$run/metrics.jsonl" "$out/train-metrics.jsonl"
  rm -rf "$out/drafter"
  mv "$run/drafter" "$out/drafter"
  split -b 15000000 "$out/drafter/model.safetensors" "$out/drafter/model.safetensors.part-" || return 1
  rm "$out/drafter/model.safetensors"
  rm -rf "$run"
  return "$rc"
}

# Parts run under timeout, in a process of their own: functions travel by name.
export out model python train_extra
export -f join_model train

"$python" -c 'import jax; print("jax", jax.__version__, jax.devices())' || failed=1
part tests 90 "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider
if [ "$extent" = full ]; then
  part kernels 60 "$python" benchmarks/bench_kernels.py --shape "$kernel_shape" --rows 1,8,64 "${repeats[@]}" --out "$out/kernels.json"
  # CUDA graphs: XLA's own choice, none, and loops and conditionals recorded as well.
  for graphs in default off loops; do
    case "$graphs" in
      default) flags='' ;;
      off) flags=--xla_gpu_enable_command_buffer= ;;
      loops) flags=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL ;;
    esac
    if [ "$dry" = 1 ]; then flags=''; fi
    setting=(env)
    if [ -n "$flags" ]; then setting=(env "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }$flags"); fi
    part "graphs-$graphs" 40 "${setting[@]}" "$python" benchmarks/bench_cycle.py \
      --shape "$shape" --batch 8 --tokens 33 --repeats 3 --out "$out/graphs-$graphs.json"
  done
  part load 170 "$python" benchmarks/bench_gpu_load.py --shape "$large_shape" --users "$users" --slots "$slots" \
    --seconds "$seconds" --profile-seconds "$((seconds * 2))" --out "$out/load.json"
fi
if [ "$extent" = quick ]; then
  part cycle 80 "$python" benchmarks/bench_cycle.py --shape "$shape" --batch 1,8,32 --repeats 3 --out "$out/cycle.json"
elif [ -z "$model" ]; then
  skip embedded "no --model DIR"
elif part join 40 bash -c join_model; [ -f "$out/target.gguf" ]; then
  export DSPARK_SMOLLM2_GGUF=$out/target.gguf
  if [ ! -f benchmarks/bench_load.py ]; then skip embedded "no benchmarks/bench_load.py"
  elif [ ! -f "$model/prompts.jsonl" ]; then skip embedded "no prompts.jsonl in $model"
  else
    part embedded "$embedded_limit" "$python" benchmarks/bench_load.py --prompts "$model/prompts.jsonl" --out "$out/embedded" \
      --rounds 1 --seconds "$load_seconds" --shown "" --profile-seconds 10 "${embedded[@]}"
  fi
  export train_seconds=$(($(left) - 25))
  if [ "$train_seconds" -gt "$train_limit" ]; then train_seconds=$train_limit; fi
  if [ ! -d "$model/text" ]; then skip train "no text in $model"
  elif [ ! -d "$model/heldout" ]; then skip train "no heldout in $model: pack it anew with --heldout"
  else part train 600 bash -c train; fi
  rm -f "$out/target.gguf"
fi

echo
echo "== summary"
printf '%s\n' "${table[@]}"
"$python" - "$out" <<'PY' || true
import json, pathlib, sys
for name in ("cycle", "kernels", "graphs-default", "graphs-off", "graphs-loops", "load"):
    path = pathlib.Path(sys.argv[1]) / f"{name}.json"
    if not path.is_file():
        continue
    result = json.loads(path.read_text())
    print()
    print(name, result["device"], result["shape"], "commit", result["commit"], result.get("acceptance", ""))
    columns = list(result["rows"][0])
    print(" | ".join(columns))
    for row in result["rows"]:
        print(" | ".join(str(row.get(c, "-")) for c in columns))
PY
exit $failed
