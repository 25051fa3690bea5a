#!/usr/bin/env bash
# From a fresh machine to a small pretrained ModernBERT: environment, build, training on real text.
# A second run reuses all that is done, and continues a training that was stopped.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CONFIG=$ROOT/configs/quickstart.yaml

usage() {
  cat <<'TEXT'
usage: bash scripts/quickstart.sh [--fresh] [--ranks N] [-- OPTION...]

Makes .venv, builds bert_unpad and pretrains a small ModernBERT with configs/quickstart.yaml.

  --fresh     a new .venv and a new training; the earlier one's folder is kept as *.previous-N
  --ranks N   processes to train with (default: one per GPU, 2 on a CPU)
  OPTION...   settings of scripts/pretrain.py, e.g. -- --schedule.total_steps 50

On a machine with an NVIDIA GPU it first checks the operators there, and trains on the CPU where one
of them is wrong or missing.

Environment: BERT_UNPAD_PYTHON names the Python, BERT_UNPAD_TORCH the PyTorch (a pip requirement).
TEXT
}

FRESH=no RANKS='' options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --fresh) FRESH=yes ;;
    --ranks)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--ranks needs a number of processes, 1 or more"
      RANKS=$2
      shift
      ;;
    -h | --help)
      usage
      exit
      ;;
    --)
      shift
      options=("$@")
      break
      ;;
    *) fail "unknown option $1" "usage: bash scripts/quickstart.sh [--fresh] [--ranks N] [-- OPTION...]" ;;
  esac
  shift
done

# The folder that the run goes to: the last --run_dir given, else the configuration's.
run_dir() {
  local dir previous=
  dir=$(sed -nE 's/^run_dir: *"?([^"#]*[^"# ])"? *(#.*)?$/\1/p' "$CONFIG")
  for option in "${options[@]}"; do
    [[ $previous != --run_dir ]] || dir=$option
    [[ $option != --run_dir=* ]] || dir=${option#*=}
    previous=$option
  done
  echo "$dir"
}

prepare pretrain

device=()
if [[ $GPU == yes ]]; then
  step "Checking the operators on the GPU"
  problem=$(gpu_problem)
  if [[ -n $problem ]]; then
    note "Training on the CPU, since the GPU cannot be used: $problem"
    device=(--device cpu)
  fi
fi
if [[ -z $RANKS ]]; then
  RANKS=2
  if [[ $GPU == yes && ${#device[@]} -eq 0 ]]; then
    RANKS=$("$PY" -c 'import torch; print(torch.cuda.device_count())')
  fi
fi
resume=()
[[ $FRESH == no ]] || resume=(--resume never)

if [[ -z ${OMP_NUM_THREADS:-} ]]; then # else torchrun sets 1, with a banner
  cores=$(nproc)
  export OMP_NUM_THREADS=$((cores > RANKS ? cores / RANKS : 1))
fi

step "Pretraining with $RANKS processes: configs/quickstart.yaml ${options[*]}"
cd "$ROOT"
# torchrun as a module: a PyTorch that .venv only borrows has put no torchrun into .venv/bin.
status=0
"$PY" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" scripts/pretrain.py \
  --config "$CONFIG" "${device[@]}" "${resume[@]}" "${options[@]}" || status=$?
[[ $status -eq 0 ]] || fail "pretraining stopped with exit code $status" \
  "the same command (without --fresh) continues from the last checkpoint"

results=$(run_dir)
step "Done. Results in $results:"
for file in summary.json training.png metrics.jsonl model; do
  [[ ! -e $results/$file ]] || note "$results/$file"
done
