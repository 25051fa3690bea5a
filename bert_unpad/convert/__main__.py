import sys

from bert_unpad.convert.cli import main

sys.exit(main())
