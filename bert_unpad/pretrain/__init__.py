"""Pretraining: `torchrun ... scripts/pretrain.py`, `python -m bert_unpad.pretrain`, or `main()`."""

from bert_unpad.pretrain.main import main

__all__ = ["main"]
