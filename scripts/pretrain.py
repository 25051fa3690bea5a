"""Pretrains BERT: torchrun --nproc-per-node N scripts/pretrain.py --config configs/NAME.yaml."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.pretrain import main

if __name__ == "__main__":
    run_main(main)
