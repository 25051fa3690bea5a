#!/usr/bin/env bash
# Runs the tests that depend on a CPU's arithmetic in settings that make this CPU compute as others.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  -h | --help)
    cat <<'TEXT'
usage: bash scripts/test_cpus.sh [PYTEST ARGUMENT...]

Makes .venv and builds bert_unpad, then runs the tests whose results depend on the CPU (or those
that the arguments name) once in each of these settings, and prints a line for each:

  as it is     what libraries choose on this CPU
  compatible   MKL's code for any processor, as on those of other makers; AVX2 elsewhere
  sse4         no vector instructions but SSE4; our operators' portable code
  avx512       AVX-512 without bf16 and AMX, where the CPU has it; MKL in AVX2
TEXT
    exit
    ;;
esac

declare -A SETTINGS=(
  ["as it is"]=""
  [compatible]="MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2"
  [sse4]="MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default
    BERT_UNPAD_ISA=generic"
  [avx512]="MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE BERT_UNPAD_ISA=avx512"
)
# Not those of sources that run on a model of a GPU, of the GPU, and of what computes in integers.
SKIPPED=(gpu_model cuda balancer data plan costs simulate benchmarks)

prepare pretrain test

cd "$ROOT"
if [[ $# -eq 0 ]]; then
  set -- tests "${SKIPPED[@]/#/--ignore=tests/}"
fi
failed=0
for name in "as it is" compatible sse4 avx512; do
  if [[ $name == avx512 ]] && ! grep -qw avx512bw /proc/cpuinfo; then
    note "$name: not run, this CPU has no AVX-512"
    continue
  fi
  log=$(mktemp)
  # shellcheck disable=SC2086 # names and values have no spaces
  if env ${SETTINGS[$name]} "$PY" -m pytest -m "not gpu_model" -n 2 --dist loadfile "$@" >"$log" 2>&1; then
    step "$name: $(tail -n 1 "$log")"
    rm "$log"
  else
    failed=1
    step "$name: FAILED, see $log"
    grep -E '^(FAILED|ERROR) ' "$log" || tail -n 20 "$log"
  fi
done
exit "$failed"
