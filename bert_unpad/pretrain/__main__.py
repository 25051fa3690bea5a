"""`python -m bert_unpad.pretrain` and `bert-unpad-pretrain` do what scripts/pretrain.py does."""

from typing import NoReturn

from bert_unpad._closed_pipe import run_main
from bert_unpad.pretrain import main


def command() -> NoReturn:
    run_main(main)


if __name__ == "__main__":
    command()
