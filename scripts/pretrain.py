"""Pretrains BERT: torchrun --nproc-per-node N scripts/pretrain.py --config configs/NAME.yaml."""

import sys

from bert_unpad.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
