#!/usr/bin/env bash
# Everything that only a GPU can show, in parts of less than 8 minutes each:
#
#   bash scripts/gpu_check.sh                        # all of them
#   bash scripts/gpu_check.sh build tests_norm       # some, in this order
#   bash scripts/gpu_check.sh tests                  # all whose names begin with tests_
#
#   build            compiles with nvcc; fails on spills; tries every operator once
#   tests_FILE       the GPU tests of tests/cuda/test_FILE.py; each file in its own process, because
#                    after a kernel that fails nothing runs on the device any more
#   memcheck_FILE    small ones of them under compute-sanitizer
#   racecheck_FILE   the same, for races in shared memory
#   benchmarks_NAME  operators, optimizers and whole training steps against their peers
#                    (benchmarks/results/<device>/ops_*.json, optim.json, model.json, model.png)
#
# What happened is added to benchmarks/results/<device>/gpu_check.json, where parts of earlier runs
# stay until they run again; several calls may run side by side. The output is kept in
# build/gpu_check/.
#
# Environment: PYTHON (default python3), LIMIT (seconds for a part, default 470), TOTAL (seconds for
# the whole call: parts that it has no time left for are named and left out; default: no bound),
# COMPUTE_SANITIZER (default: the one on PATH or of the nvidia-cuda-sanitizer-api wheel).
#
# Exits with 1 if a part failed or was left out, 2 if there is no GPU or a part is unknown.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
limit=${LIMIT:-470}
total=${TOTAL:-1000000}

# parts_of KIND TEXT: a part for each file of GPU tests with this text.
parts_of() { grep -l "$2" tests/cuda/test_*.py | sed "s|.*/test_\(.*\)\.py|$1_\1|"; }

mapfile -t all < <(
  echo build
  parts_of tests 'def test_'
  parts_of memcheck mark.sanitizer
  parts_of racecheck mark.sanitizer
)
for name in attention gelu loss norm mlp optim one_bit model; do all+=("benchmarks_$name"); done

parts=()
for wanted in "$@"; do
  found=()
  for part in "${all[@]}"; do [[ $part != "$wanted"_* ]] || found+=("$part"); done
  [[ " ${all[*]} " != *" $wanted "* ]] || found=("$wanted")
  if [ ${#found[@]} -eq 0 ]; then
    echo "gpu_check: unknown part '$wanted'; parts: ${all[*]}" >&2
    exit 2
  fi
  parts+=("${found[@]}")
done
[ $# -gt 0 ] || parts=("${all[@]}")

device=$("$python" -m benchmarks.lib.device)
if [ -z "$device" ]; then
  echo "gpu_check: $python's PyTorch sees no GPU" >&2
  exit 2
fi
logs=build/gpu_check
mkdir -p "$logs"
export BERT_UNPAD_CUDA=1
failed=0

# Seconds for the next step; 0 if there are too few.
time_left() {
  local left=$((total - SECONDS))
  if ((left < 30)); then left=0; fi
  echo $((left < limit ? left : limit))
}

# step NAME COMMAND...: runs it, keeps its output, and adds how it ended to the report.
step() {
  local name=$1 begin=$SECONDS status=0 seconds
  shift
  seconds=$(time_left)
  if [ "$seconds" -eq 0 ]; then
    echo "gpu_check: no time left for $name" >&2
    failed=1
    return
  fi
  rm -f "$logs/$name.xml"
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" > >(tee "$logs/$name.log") 2>&1 || status=$?
  [ "$status" -ne 124 ] || echo "gpu_check: $name took longer than $seconds s" >&2
  [[ $status -ne 5 || $* != *pytest* ]] || echo "gpu_check: $name: no test could run" >&2
  [ "$status" -eq 0 ] || failed=1
  report "$name" --status "$status" --seconds $((SECONDS - begin))
}

report() {
  flock "$logs/lock" "$python" -m benchmarks.gpu_report --device "$device" --logs "$logs" "$@" ||
    failed=1
}

# tests NAME MARKS PYTEST_ARGUMENT...: with $under before the command.
under=()
tests() {
  local name=$1 marks=$2
  shift 2
  step "$name" "${under[@]}" "$python" -m pytest -rs -m "$marks" \
    --junitxml="$logs/$name.xml" "$@"
}

# The caching allocator would hide accesses past the end of a tensor from memcheck. Errors that the
# CUDA API returns are left to those who called it: PyTorch asks for functions that a driver may not
# have. Importing PyTorch may take longer than the tool waits by default, and its kernels are left
# out, which would take most of the time.
sanitizer() {
  local part=$1 kind=${1%%_*} tool=${COMPUTE_SANITIZER:-}
  [ -n "$tool" ] || tool=$(command -v compute-sanitizer) || tool=$("$python" - <<'PY'
import sysconfig
from pathlib import Path

print(*sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/compute-sanitizer"))[:1])
PY
  )
  if [ -z "$tool" ]; then
    echo "gpu_check: $part was not run: there is no compute-sanitizer" >&2
    report "$part" --missing "no compute-sanitizer"
    failed=1
    return
  fi
  under=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$kind" --error-exitcode 1)
  under+=(--kernel-name kns=bert_unpad --report-api-errors no)
  under+=(--launch-timeout 0 --target-processes all)
  tests "$part" "gpu and sanitizer" -x "tests/cuda/test_${part#*_}.py"
  under=()
}

for part in "${parts[@]}"; do
  case $part in
    build)
      step build "$python" setup.py build_ext --inplace
      step ptxas "$python" -m benchmarks.cuda_build
      step info "$python" -m bert_unpad.info
      step check "$python" -m bert_unpad.info --check
      ;;
    tests_*) tests "$part" gpu "tests/cuda/test_${part#tests_}.py" ;;
    memcheck_* | racecheck_*) sanitizer "$part" ;;
    benchmarks_model)
      # The last contenders are compiled, which takes up to two minutes each.
      step "$part" "$python" -m benchmarks.model --device cuda \
        --start-within "$(($(time_left) - 150))"
      ;;
    benchmarks_optim | benchmarks_one_bit)
      step "$part" "$python" -m "benchmarks.${part#benchmarks_}" --device cuda
      ;;
    benchmarks_*)
      step "$part" "$python" -m benchmarks.ops --device cuda --op "${part#benchmarks_}"
      ;;
  esac
done
exit "$failed"
