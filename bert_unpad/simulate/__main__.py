"""`python -m bert_unpad.simulate`."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.simulate.cli import main

if __name__ == "__main__":
    run_main(main)
