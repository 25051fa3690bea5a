"""Runs the command as `python -m bert_unpad.data`."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.data.cli import main

if __name__ == "__main__":
    run_main(main)
