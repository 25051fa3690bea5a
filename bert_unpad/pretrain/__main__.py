"""`python -m bert_unpad.pretrain` does what scripts/pretrain.py does."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.pretrain import main

run_main(main)
