"""`python -m bert_unpad.pretrain` does what scripts/pretrain.py does."""

import sys

from bert_unpad.pretrain import main

sys.exit(main())
