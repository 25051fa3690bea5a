"""Runs the command as `python -m bert_unpad.data`."""

import sys

from bert_unpad.data.cli import main

if __name__ == "__main__":
    sys.exit(main())
