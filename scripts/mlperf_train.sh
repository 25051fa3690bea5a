#!/usr/bin/env bash
# MLPerf Training's benchmark BERT, from the benchmark's folder of files to finished logs.
# docs/training/mlperf.md says what the folder holds, and which rules a result has to meet besides.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PY=${PYTHON:-python}
RULES=5.0.0 # the last ones with BERT

usage() {
  cat <<'TEXT'
usage: bash scripts/mlperf_train.sh FOLDER OUTPUT [OPTION...] [-- SETTING...]

Trains from the files in FOLDER, once for each log OUTPUT/result_N.txt that is not there yet, and
runs MLPerf's checkers on the logs. A log without run_stop, of a run that broke off, is renamed to
result_N.txt.partial, and its run is made again. Each run has a seed of its own, from the system's
randomness. All runs of an OUTPUT have the same batch, files, checkpoint and SETTINGs, which
OUTPUT/settings.txt holds; others are refused.

  --batch N        global batch: 256, 448 (default), 1536, 3072, 4096, 8192 or 16384, with MLPerf's
                   settings for it; for another N give the settings after --
  --runs N         logs to make (default 1; a submission has 10)
  --ranks N        processes on this machine (default: one per GPU, 1 without)
  --train PATH     training files, HDF5 or TFRecord      (default FOLDER/train)
  --eval PATH      evaluation files, in the same format  (default FOLDER/eval)
  --shards PATH    where both are imported to, once, which other OUTPUTs may name too
                   (default OUTPUT/shards)
  --checkpoint P   the start: a TensorFlow 1 checkpoint's prefix, a .pt file, or a folder in
                   Hugging Face's layout   (default FOLDER/tf1_ckpt/model.ckpt-28252)
  --org TEXT, --platform TEXT   submission_org and submission_platform of the log
  --keep-caches    do not clear the system's file caches before a run (which takes root)
  SETTING...       settings of scripts/pretrain.py, e.g. -- --batching.accumulation 4

FOLDER also holds vocab.txt and bert_config.json. PYTHON names the interpreter (default: python),
which has bert_unpad[pretrain,hdf5,mlperf].
TEXT
}

# fail MESSAGE
fail() {
  printf 'mlperf_train.sh: error: %s\n' "$1" >&2
  exit 2
}

folder='' output='' batch=448 runs=1 ranks='' train='' evaluation='' shards='' checkpoint='' org='' platform=''
clear=yes settings=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --batch | --runs | --ranks)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "$1: expected a number >= 1, got '${2:-}'"
      declare "${1#--}=$2"
      shift
      ;;
    --train | --eval | --shards | --checkpoint | --org | --platform)
      [[ -n ${2:-} ]] || fail "$1: expected a value, got none"
      name=${1#--}
      declare "${name/eval/evaluation}=$2"
      shift
      ;;
    --keep-caches) clear=no ;;
    -h | --help)
      usage
      exit
      ;;
    --)
      shift
      settings=("$@")
      break
      ;;
    -*) fail "expected an option of --help, got $1" ;;
    *)
      if [[ -z $folder ]]; then folder=$1; elif [[ -z $output ]]; then output=$1; else
        fail "expected FOLDER OUTPUT, got a third name, $1"
      fi
      ;;
  esac
  shift
done
[[ -n $output ]] || fail "expected FOLDER OUTPUT, got '$folder'; see --help"

folder=$(realpath -m "$folder") output=$(realpath -m "$output")
train=$(realpath -m "${train:-$folder/train}") evaluation=$(realpath -m "${evaluation:-$folder/eval}")
shards=$(realpath -m "${shards:-$output/shards}")
checkpoint=$(realpath -m "${checkpoint:-$folder/tf1_ckpt/model.ckpt-28252}")
for file in "$train" "$evaluation" "$folder/vocab.txt" "$folder/bert_config.json"; do
  [[ -e $file ]] || fail "expected $file, got none"
done
[[ $train != *\?* ]] || fail "--train: expected a path without ?, got $train"

# Rows of MLPerf's table: the reference's settings, by global batch (rcps_bert.json of its checker).
row() { # LR STEPS WARMUP START BETA1 BETA2 DECAY
  recipe=(--optimizer.lr "$1" --schedule.total_steps "$2" --schedule.warmup_steps "$3"
    --schedule.start_warmup_step "$4" --optimizer.betas "[$5, $6]" --optimizer.weight_decay "$7")
}
case $batch in
  256) row 3.5e-4 13700 0 0 0.9 0.999 0.01 ;;
  448) row 4.25e-4 6700 0 0 0.9 0.999 0.01 ;;
  1536) row 2e-3 2254 0 0 0.66 0.996 0.01 ;;
  3072) row 2e-3 1141 100 0 0.66 0.998 0.01 ;;
  4096) row 2.4e-3 855 0 0 0.66 0.998 0.01 ;;
  8192) row 2.88293e-3 600 287 -76 0.88 0.88 0.0166629 ;;
  16384) row 3.3e-3 600 290 -100 0.75 0.9 0.0166629 ;;
  *)
    [[ ${#settings[@]} -gt 0 ]] || fail "--batch: expected one of MLPerf's table, or settings after --, got $batch"
    recipe=()
    ;;
esac

# What has to be the same in all runs.
start=("$checkpoint"*)
[[ ! -d $checkpoint ]] || start=("$checkpoint"/*)
[[ -e ${start[0]} ]] || fail "--checkpoint: expected $checkpoint, got none"
noted=$(
  printf '%s\n' "batch $batch" "train $train" "eval $evaluation" "settings ${settings[*]}"
  stat --printf '%n, %s bytes, %y\n' "${start[@]}" "$folder/vocab.txt" "$folder/bert_config.json"
)
mkdir -p "$output"
if [[ ! -e $output/settings.txt ]]; then
  printf '%s\n' "$noted" >"$output/settings.txt"
elif ! diff "$output/settings.txt" - <<<"$noted" >&2; then
  fail "OUTPUT: expected a folder of runs with the same settings and files, got $output with others (<)"
fi

cd "$ROOT"
preset=$checkpoint
if [[ ! -d $checkpoint ]]; then
  # The reference computes the GELU of its bert_config.json by tanh.
  preset=$output/checkpoint layout=google
  [[ $checkpoint != *.pt ]] || layout=nvidia
  if [[ -d $preset ]]; then
    echo "there already: $preset"
  else
    mkdir -p "$preset.partial"
    "$PY" -m bert_unpad.convert "$checkpoint" "$preset.partial" --from "$layout" \
      --config "$folder/bert_config.json" --hidden-act gelu_new
    mv "$preset.partial" "$preset"
  fi
fi

# The reference writes TFRecord, other preparations HDF5 (packed: output_00000 and so on).
is_hdf5() { # FILE...
  local file
  for file; do
    [[ $file == *.h*5 || ${file##*/} =~ ^output_[0-9]{5}$ ]] && return
  done
  return 1
}
kind=tfrecord
! is_hdf5 "$train" "$train"/* || kind=hdf5
held_out=${evaluation//%/%25} # options of a source are URL-encoded
held_out=${held_out//+/%2B} held_out=${held_out//&/%26}
# Training opens shards: the files are imported once, before any clock runs.
"$PY" -m bert_unpad.data import "$kind:$train?validation=$held_out" "$shards" \
  --vocab-file "$folder/vocab.txt"
arguments=(--config configs/bert_large_mlperf.yaml --model.preset "$preset"
  --data.source "shards:$shards" --data.vocab_file "$folder/vocab.txt"
  --batching.global_batch_size "$batch" --checkpoint.every 0 "${recipe[@]}" "${settings[@]}")

if [[ -z $ranks ]]; then
  ranks=$("$PY" -c 'import torch; print(max(torch.cuda.device_count(), 1))')
fi
for ((number = 0; number < runs; number++)); do
  log=$output/result_$number.txt
  if [[ -e $log ]]; then
    if grep -q '"key": "run_stop"' "$log"; then
      echo "there already: $log"
      continue
    fi
    mv --backup=numbered "$log" "$log.partial"
    echo "has no run_stop: $log is now $log.partial"
  fi
  cleared=false
  if [[ $clear == yes ]] && sync && { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null; then
    cleared=true
  else
    echo "file caches are as they were: cache_clear is false in $log"
  fi
  submission=$(
    "$PY" - "$org" "$platform" "$cleared" <<'PYTHON'
import json, sys

org, platform, cleared = sys.argv[1:]
given = {"submission_org": org, "submission_platform": platform}
print(json.dumps({k: v for k, v in given.items() if v} | {"cache_clear": cleared == "true"}))
PYTHON
  )
  "$PY" -m torch.distributed.run --standalone --nproc-per-node "$ranks" scripts/pretrain.py \
    "${arguments[@]}" \
    --run_dir "$output/run_$number" --resume never --seed "$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')" \
    --logging.mlperf "$log" --logging.mlperf_submission "$submission"
done

failed=0
for log in "$output"/result_*.txt; do
  "$PY" -m mlperf_logging.compliance_checker --usage training --ruleset "$RULES" \
    --log_output "${log%.txt}.compliance" "$log" || failed=1
done
if [[ $runs -ge 10 ]]; then # it leaves out the fastest and the slowest
  "$PY" -m mlperf_logging.rcp_checker --rcp_version "$RULES" \
    --log_output "$output/rcp_checker.log" "$output" || failed=1
fi
exit "$failed"
