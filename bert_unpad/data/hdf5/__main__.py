"""Runs `python -m bert_unpad.data.hdf5`."""

import sys

from bert_unpad.data.hdf5.cli import main

if __name__ == "__main__":
    sys.exit(main())
