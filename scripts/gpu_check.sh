#!/usr/bin/env bash
# Everything that only a GPU can show, in parts of less than 8 minutes each:
#
#   bash scripts/gpu_check.sh                        # all of them
#   bash scripts/gpu_check.sh build tests            # some, in this order
#   bash scripts/gpu_check.sh benchmarks             # all whose names begin with benchmarks_
#   bash scripts/gpu_check.sh --dry [PART...]        # runs nothing, needs no GPU: finds out whether
#                                                    # the packages are there that the parts need
#
#   build            compiles with nvcc; fails on spills
#   check            tries every operator once
#   calibrate        rates, gaps and the clock that predictions are made of: a minute
#   tests            the GPU tests of tests/cuda and tests/ops, by a process for every four thirds of
#                    a core; one whose device is lost ends, and another goes on
#                    (tests/support/gpu_hooks.py)
#   tests_FILE       of the files test_FILE.py only; not among the parts that run by default
#   large            those that need 12 to 32 GiB of GPU memory, one after the other
#   memcheck_FILE    small ones of them under compute-sanitizer, of which EVERY=8 takes every eighth
#   racecheck_FILE   the same, for races in shared memory
#   benchmarks_NAME  operators, optimizers and whole training steps against their peers
#                    (benchmarks/results/<device>/ops_*.json, optim.json, model.json, model.png)
#   quickstart       training runs of the quickstart in bf16 with CUDA graphs, and in 8 bits
#
# What happened is added to benchmarks/results/<device>/gpu_check.json, where parts of earlier runs
# stay until they run again; several calls may run side by side. The output is kept in
# build/gpu_check/.
#
# Environment: PYTHON (default python3), LIMIT (seconds for a part, default 470), TOTAL (seconds for
# the whole call: parts that it has no time left for are named and left out; default: no bound),
# EVERY (of the tests under compute-sanitizer only every EVERY-th; default 1),
# COMPUTE_SANITIZER (default: the one on PATH or of the nvidia-cuda-sanitizer-api wheel).
#
# Exits with 1 if a part failed or was left out, 2 if there is no GPU or a part is unknown. Parts of
# compute-sanitizer where it refuses the device, as it does in some virtual machines, are named and
# left out, and do not count as failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
limit=${LIMIT:-470}
total=${TOTAL:-1000000}
refusal='Device not supported'
processes=$((($(nproc) * 3 + 3) / 4))

dry=
if [[ ${1:-} == --dry ]]; then
  dry=1
  shift
fi

# parts_of KIND TEXT: a part for each name of files of GPU tests with this text.
parts_of() {
  { ls tests/cuda/test_*.py && grep -l 'backend: Backend' tests/ops/test_*.py; } |
    xargs grep -l "$2" | sed "s|.*/test_\(.*\)\.py|$1_\1|" | sort -u
}

# files_of PART...: the files of parts with such names.
files_of() {
  local part
  for part in "$@"; do ls tests/{cuda,ops}/"test_${part#*_}.py" 2>/dev/null; done
}

mapfile -t all < <(
  printf '%s\n' build check calibrate tests large
  parts_of memcheck mark.sanitizer
  parts_of racecheck mark.sanitizer
)
for name in attention gelu loss norm mlp optim one_bit model; do all+=("benchmarks_$name"); done
all+=(quickstart)
mapfile -t files < <(parts_of tests 'def test_')

parts=()
for wanted in "$@"; do
  found=()
  for part in "${all[@]}"; do [[ $part != "$wanted"_* ]] || found+=("$part"); done
  [[ " ${all[*]} ${files[*]} " != *" $wanted "* ]] || found=("$wanted")
  if [ ${#found[@]} -eq 0 ]; then
    echo "gpu_check: unknown part '$wanted'; parts: ${all[*]} ${files[*]}" >&2
    exit 2
  fi
  parts+=("${found[@]}")
done
[ $# -gt 0 ] || parts=("${all[@]}")

device=$("$python" -m benchmarks.lib.device)
if [ -z "$device" ] && [ -z "$dry" ]; then
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
  if [ -n "$dry" ]; then
    echo "== $name"
    "$python" -m benchmarks.lib.dry_run "$@" || failed=1
    return
  fi
  seconds=$(time_left)
  if [ "$seconds" -eq 0 ]; then
    echo "gpu_check: no time left for $name" >&2
    failed=1
    return
  fi
  rm -f "$logs/$name.xml"
  echo "== $name: $*"
  timeout -k 10 "$seconds" "$@" > >(tee "$logs/$name.log") 2>&1 || status=$?
  if [ "$status" -ne 0 ] && [ ${#under[@]} -gt 0 ] && refused "$name"; then
    not_run "$name" "compute-sanitizer: $refusal"
    return
  fi
  [ "$status" -ne 124 ] || echo "gpu_check: $name took longer than $seconds s" >&2
  [[ $status -ne 5 || $* != *pytest* ]] || echo "gpu_check: $name: no test could run" >&2
  [ "$status" -eq 0 ] || failed=1
  report "$name" --status "$status" --seconds $((SECONDS - begin))
}

report() {
  flock "$logs/lock" "$python" -m benchmarks.gpu_report --device "$device" --logs "$logs" "$@" ||
    failed=1
}

# not_run PART REASON
not_run() {
  echo "gpu_check: $1 was not run: $2" >&2
  [ -n "$dry" ] || report "$1" --missing "$2"
}

# refused PART: whether compute-sanitizer refused the device in this part or in one before.
was_refused=
refused() {
  sleep 1 # tee may still be writing
  [ -n "$was_refused" ] || ! grep -q "$refusal" "$logs/$1.log" || was_refused=1
  [ -n "$was_refused" ]
}

# tests NAME MARKS PYTEST_ARGUMENT...: with $under before the command.
under=()
tests() {
  local name=$1 marks=$2
  shift 2
  step "$name" "${under[@]}" "$python" -m pytest -rs -m "$marks" \
    --junitxml="$logs/$name.xml" "$@"
}

# spread NAME MARKS PROCESSES PYTEST_ARGUMENT...: tests by several processes, of which any may end
# in the middle of a test: by a kernel that fails or hangs. The test is reported, and the rest go on
# in a new process.
spread() {
  local name=$1 marks=$2 count=$3 cores limit
  shift 3
  cores=$(nproc)
  # Seconds of one test. A machine that is slower says so, as tests/support/processes.py reads it.
  limit=$(awk -v slowness="${BERT_UNPAD_TEST_SLOWNESS:-1}" 'BEGIN { print 150 * slowness }')
  OMP_NUM_THREADS=$(((cores + count - 1) / count)) tests "$name" "$marks" -n "$count" \
    --max-worker-restart=50 -o "faulthandler_timeout=$limit" -o faulthandler_exit_on_timeout=true "$@"
}

# The caching allocator would hide accesses past the end of a tensor from memcheck. Errors that the
# CUDA API returns are left to those who called it: PyTorch asks for functions that a driver may not
# have. Importing PyTorch may take longer than the tool waits by default, and its kernels are left
# out, which would take most of the time.
sanitizer() {
  local part=$1 kind=${1%%_*} tool=${COMPUTE_SANITIZER:-}
  if [ -n "$was_refused" ]; then
    not_run "$part" "compute-sanitizer: $refusal"
    return
  fi
  [ -n "$tool" ] || tool=$(command -v compute-sanitizer) || tool=$("$python" - <<'PY'
import sysconfig
from pathlib import Path

print(*sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/compute-sanitizer"))[:1])
PY
  )
  if [ -z "$tool" ]; then
    not_run "$part" "no compute-sanitizer"
    failed=1
    return
  fi
  under=(env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$tool" --tool "$kind" --error-exitcode 1)
  under+=(--kernel-name kns=bert_unpad --report-api-errors no)
  under+=(--launch-timeout 0 --target-processes all)
  # The files are those of `tests`.
  local found
  mapfile -t found < <(files_of "$part")
  [ -n "$dry" ] || BERT_UNPAD_TEST_EVERY=${EVERY:-1} \
    tests "$part" "gpu and sanitizer" -x "${found[@]}"
  under=()
}

# quickstart NAME OPTION...
quickstart() {
  local name=$1
  shift
  rm -rf "${logs:?}/$name"
  step "$name" "$python" -m bert_unpad.pretrain --config configs/quickstart.yaml --device cuda \
    --run_dir "$logs/$name" "$@"
}

for part in "${parts[@]}"; do
  case $part in
    build)
      step build "$python" setup.py build_ext --inplace
      step ptxas "$python" -m benchmarks.cuda_build
      ;;
    check)
      step info "$python" -m bert_unpad.info
      step check "$python" -m bert_unpad.info --check
      ;;
    calibrate) step calibrate "$python" -m benchmarks.calibrate ;;
    tests)
      # What all others stand on comes first.
      first=() others=()
      for file in "${files[@]}"; do
        case ${file#tests_} in
          conformance | attention | attention_windows | linear | norm) first+=("$file") ;;
          *) others+=("$file") ;;
        esac
      done
      mapfile -t ordered < <(files_of "${first[@]}" "${others[@]}")
      spread tests "gpu and not large" "$processes" "${ordered[@]}"
      ;;
    tests_*)
      mapfile -t found < <(files_of "$part")
      spread "$part" "gpu and not large" "$processes" "${found[@]}"
      ;;
    large) spread large "gpu and large" 1 tests/cuda tests/ops ;;
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
    quickstart)
      quickstart quickstart --precision bf16 --cuda_graphs true
      quickstart quickstart_fp8 --precision fp8 --amax_history 1024
      ;;
  esac
done
exit "$failed"
