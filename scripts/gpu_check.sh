#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: builds, runs the GPU tests, runs them again
# under compute-sanitizer where it is installed, and writes what happened to
# benchmarks/results/<device>/gpu_check.json. The steps' output is kept in build/gpu_check/.
#
#   bash scripts/gpu_check.sh            # PYTHON=... picks another interpreter
#   FAST=1 bash scripts/gpu_check.sh     # no compute-sanitizer
#
# Exits with 1 if a step failed, 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}

device=$("$python" - <<'PY'
import re
import torch

if torch.cuda.is_available():
    print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))
PY
)
if [ -z "$device" ]; then
  echo "gpu_check: $python's PyTorch sees no GPU" >&2
  exit 2
fi
results=benchmarks/results/$device
logs=build/gpu_check
mkdir -p "$results" "$logs"
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT
failed=0

# step NAME COMMAND...: runs it, keeps its output, and notes how it ended.
step() {
  local name=$1 begin=$SECONDS status=0
  shift
  echo "== $name: $*"
  "$@" > >(tee "$logs/$name.log") 2>&1 || status=$?
  [ "$status" -eq 0 ] || failed=1
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begin))" >>"$steps"
}

export BERT_UNPAD_CUDA=1
step build "$python" setup.py build_ext --inplace
step ptxas "$python" scripts/check_cuda_build.py
step info "$python" -m bert_unpad.info
step tests "$python" -m pytest tests -m gpu --junitxml="$logs/tests.xml"

# The caching allocator would hide accesses past the end of a tensor from memcheck.
if [ -z "${FAST:-}" ] && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$tool" --error-exitcode 1 --target-processes all \
      "$python" -m pytest tests/test_cuda.py -m "gpu and not slow" -k "not graph and not opcheck" -x
  done
else
  echo "gpu_check: compute-sanitizer was not run"
fi

"$python" - "$results" "$logs" "$steps" <<'PY'
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path

from bert_unpad import info

results, logs, steps = map(Path, sys.argv[1:])


def output(*command):
    out = subprocess.run(command, capture_output=True, text=True)
    return out.stdout.strip() or None


report = {
    "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    "commit": output("git", "rev-parse", "HEAD"),
    "uncommitted_changes": bool(output("git", "status", "--porcelain")),
    "info": info.collect(),
    "steps": {},
}
for line in steps.read_text().splitlines():
    name, status, seconds = line.split("\t")
    report["steps"][name] = {"ok": status == "0", "seconds": int(seconds)}
junit = logs / "tests.xml"
if junit.is_file():
    suite = ET.parse(junit).getroot().find("testsuite")
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    report["steps"]["tests"].update(counts)
temporary = results / "gpu_check.json.tmp"
temporary.write_text(json.dumps(report, indent=2) + "\n")
os.replace(temporary, results / "gpu_check.json")
print(f"gpu_check: wrote {results / 'gpu_check.json'}")
PY
exit "$failed"
