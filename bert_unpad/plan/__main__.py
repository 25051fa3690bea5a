"""`python -m bert_unpad.plan`."""

import sys

from bert_unpad.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
