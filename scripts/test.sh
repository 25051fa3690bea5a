#!/usr/bin/env bash
# From a fresh machine to test results: environment, build, pytest. Arguments go to pytest.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

FRESH=no
case ${1:-} in
  --fresh)
    FRESH=yes
    shift
    ;;
  -h | --help)
    cat <<'TEXT'
usage: bash scripts/test.sh [--fresh] [PYTEST ARGUMENT...]

Makes .venv (with --fresh a new one), builds bert_unpad (where nvcc is found,
with the CUDA operators unless BERT_UNPAD_CUDA=0) and runs the tests in two
processes (-n 0: in one), e.g. bash scripts/test.sh tests/batch/test_batch.py -k mask
Random inputs follow from one seed, 0; --seed N takes another.
TEXT
    exit
    ;;
esac

want_cuda
prepare pretrain test

step "Tests"
cd "$ROOT"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
start=$SECONDS status=0
# A file's tests stay in one process, as they share what is costly to make. Not more than two: large
# GPU tests take up to 32 GB each. Each has half of the cores: with more threads than cores, threads
# that wait for each other take the time of those that work.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 2 ? cores / 2 : 1))}
"$PY" -m pytest --color=auto -n 2 --dist loadfile --no-loadscope-reorder --seed 0 "$@" 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
summary=$(grep -E '[0-9]+ (passed|failed|error|skipped|deselected)' "$log" | tail -n 1 || true)
[[ $status -eq 0 ]] || fail "the tests failed (pytest's exit code is $status): ${summary:-no test ran}"
step "Tests passed in $((SECONDS - start)) s: $summary"
