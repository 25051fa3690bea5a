#!/usr/bin/env bash
# Everything that only a GPU can show, in parts of less than 8 minutes each:
#
#   bash scripts/gpu_check.sh                      # all of them
#   bash scripts/gpu_check.sh build tests          # some, in this order
#
#   build       compiles with nvcc; fails on spills
#   tests       the GPU tests
#   memcheck    small ones of them under compute-sanitizer
#   racecheck   the same, for races in shared memory
#   benchmarks  operators, optimizers and whole training steps against their peers
#               (benchmarks/results/<device>/ops_*.json, optim.json, model.json, model.png)
#
# What happened is added to benchmarks/results/<device>/gpu_check.json, where steps of earlier runs
# stay until they run again. The steps' output is kept in build/gpu_check/.
#
# Environment: PYTHON (default python3), LIMIT (seconds for a step, default 470),
# COMPUTE_SANITIZER (default: the one on PATH or of the nvidia-cuda-sanitizer-api wheel).
#
# Exits with 1 if a step failed, 2 if there is no GPU or a part is unknown.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
limit=${LIMIT:-470}
all=(build tests memcheck racecheck benchmarks)
parts=("$@")
[ $# -gt 0 ] || parts=("${all[@]}")
for part in "${parts[@]}"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then
    echo "gpu_check: unknown part '$part'; parts: ${all[*]}" >&2
    exit 2
  fi
done

device=$("$python" -m benchmarks.lib.device)
if [ -z "$device" ]; then
  echo "gpu_check: $python's PyTorch sees no GPU" >&2
  exit 2
fi
logs=build/gpu_check
mkdir -p "$logs"
export BERT_UNPAD_CUDA=1
failed=0

# step NAME COMMAND...: runs it, keeps its output, and adds how it ended to the report.
step() {
  local name=$1 begin=$SECONDS status=0
  shift
  rm -f "$logs/$name.xml"
  echo "== $name: $*"
  timeout -k 10 "$limit" "$@" > >(tee "$logs/$name.log") 2>&1 || status=$?
  [ "$status" -ne 124 ] || echo "gpu_check: $name took longer than $limit s" >&2
  [ "$status" -eq 0 ] || failed=1
  report "$name" --status "$status" --seconds $((SECONDS - begin))
}

report() { "$python" -m benchmarks.gpu_report --device "$device" --logs "$logs" "$@" || failed=1; }

# Only this folder holds GPU tests; others need packages that a GPU machine may lack.
gpu_tests=(tests/cuda)

tests() { step tests "$python" -m pytest "${gpu_tests[@]}" -m gpu --junitxml="$logs/tests.xml"; }

# The caching allocator would hide accesses past the end of a tensor from memcheck.
sanitizer() {
  local tool=${COMPUTE_SANITIZER:-}
  [ -n "$tool" ] || tool=$(command -v compute-sanitizer) || tool=$("$python" - <<'PY'
import sysconfig
from pathlib import Path

print(*sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/compute-sanitizer"))[:1])
PY
  )
  if [ -z "$tool" ]; then
    echo "gpu_check: $1 was not run: there is no compute-sanitizer" >&2
    report "$1" --missing "no compute-sanitizer"
    failed=1
    return
  fi
  step "$1" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "$tool" --tool "$1" --error-exitcode 1 --target-processes all \
    "$python" -m pytest "${gpu_tests[@]}" -m "gpu and sanitizer" -x --junitxml="$logs/$1.xml"
}

for part in "${parts[@]}"; do
  case $part in
    build)
      step build "$python" setup.py build_ext --inplace
      step ptxas "$python" -m benchmarks.cuda_build
      step info "$python" -m bert_unpad.info
      ;;
    tests) tests ;;
    memcheck | racecheck) sanitizer "$part" ;;
    benchmarks)
      for op in attention gelu loss norm mlp; do
        step "benchmarks_$op" "$python" -m benchmarks.ops --device cuda --op "$op"
      done
      step benchmarks_optim "$python" -m benchmarks.optim --device cuda
      step benchmarks_one_bit "$python" -m benchmarks.one_bit --device cuda
      # The last contenders are compiled, which takes up to two minutes each.
      step benchmarks_model "$python" -m benchmarks.model --device cuda \
        --start-within "$((limit - 150))"
      ;;
  esac
done
exit "$failed"
