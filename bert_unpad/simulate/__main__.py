"""`python -m bert_unpad.simulate`."""

import sys

from bert_unpad.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
