"""What a worker process runs before anything else: it ends with the process that started it.

Importing the package takes seconds, and a function in C may hold Python's lock for minutes; until
then no thread of Python's could end the process, but the kernel can. So this file imports nothing
of the package: it is run as the worker's program. Systems other than Linux leave it to
`begin_worker`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ["BERT_UNPAD_PARENT"] != str(os.getppid()):  # it has ended before that call
        os._exit(1)
