"""Runs `python -m bert_unpad.data.hdf5`."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.data.hdf5.cli import main

if __name__ == "__main__":
    run_main(main)
