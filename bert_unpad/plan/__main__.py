"""`python -m bert_unpad.plan`."""

from bert_unpad._closed_pipe import run_main
from bert_unpad.plan.cli import main

if __name__ == "__main__":
    run_main(main)
