#!/usr/bin/env bash
# The CPU operators under AddressSanitizer and UndefinedBehaviorSanitizer: builds a copy of the
# checkout in build/sanitize with them, and runs the operators' tests once for each instruction set
# that this processor has. The first finding stops a run. Arguments go to pytest in the place of
# the test files:
#
#   bash scripts/sanitize.sh
#   bash scripts/sanitize.sh tests/ops/test_gelu.py -x
#
# Environment: PYTHON (default: that of .venv, else python3), needs what the tests need;
# ISAS (default: all that the processor has), e.g. "generic avx2".
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x .venv/bin/python ]] || python=$PWD/.venv/bin/python
fi
# tests/ops/test_isas.py runs all instruction sets by itself, so once is enough.
tests=("$@")
if [[ $# -eq 0 ]]; then
  for file in tests/ops/test_*.py tests/batch/test_batch.py; do
    [[ $file == tests/ops/test_isas.py ]] || tests+=("$file")
  done
fi

copy=build/sanitize
mkdir -p "$copy"
# Its build folder and compiled modules stay: ninja compiles what has changed.
find "$copy" -mindepth 1 -type f -not -path "$copy/build/*" -not -name '*.so' -delete
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
  xargs -0 cp --parents --preserve=timestamps --target-directory="$copy"
cd "$copy"

flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
compiler=${CXX:-g++}
BERT_UNPAD_CUDA=0 CXX="$compiler $flags" "$python" setup.py -q build_ext --inplace

# The interpreter is not built with AddressSanitizer, so its library has to be there first; that of
# C++ with it, whose exceptions it looks at. Python does not free all that it takes.
read -ra command <<<"$compiler"
preload=
for library in libasan.so libstdc++.so; do
  preload+="$("${command[@]}" -print-file-name="$library") "
done
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$PWD

isas=${ISAS:-}
[[ -n $isas ]] || isas=$(LD_PRELOAD=$preload "$python" - <<'PY'
from bert_unpad import _C

built = _C.built_isas().split(",")
print(*built[: built.index(_C.cpu_isa()) + 1])
PY
)
failed=0
for isa in $isas; do
  echo "== $isa"
  # CXX: what tests compile themselves, such as the kernels for AMX with a model of its tiles.
  CXX="$compiler $flags" BERT_UNPAD_ISA=$isa LD_PRELOAD=$preload \
    "$python" -m pytest -n 0 -m "not gpu_model" "${tests[@]}" || failed=1
done
exit "$failed"
