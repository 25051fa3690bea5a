#!/usr/bin/env bash
# Pretraining on bare hosts: run the same command on each of them.
#
#   MASTER=host0:29500 NODES=4 GPUS=8 launch/torchrun.sh --config configs/bert_base_phase1.yaml
#
# MASTER is any one of the hosts, at a free port. Each host may join late, leave and join again:
# torchrun then starts all workers anew, up to RESTARTS times, and they go on from the newest
# checkpoint. NODES may be a range, such as 2:4: the run goes on with two or three hosts while
# others are away, where batching.global_batch_size is a multiple of the number of ranks. The folder
# of the run and the data cache must be the same for all hosts.
set -euo pipefail

: "${MASTER:?expected host:port of one of the hosts}"
root=$(cd "$(dirname "$0")/.." && pwd)

# In PyTorch 2.5 to 2.13 at least, restarted workers may otherwise find the addresses of those before
# them and fail to connect (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${GPUS:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$MASTER" \
    --rdzv-id "${RUN_ID:-bert_unpad}" \
    --max-restarts "${RESTARTS:-3}" \
    "$root/scripts/pretrain.py" "$@"
