"""Runs `python -m bert_unpad.evaluate`."""

import sys

from bert_unpad.evaluate.cli import main

if __name__ == "__main__":
    sys.exit(main())
