"""Keeps freed memory in the process, so that every training step reuses the pages of the last one.

glibc returns blocks above a threshold (32 MiB at most) to the kernel when they are freed, and gets
zeroed pages for the next one. A training step on a CPU allocates and frees hundreds of such blocks;
faulting their pages in again costs it up to 1.6 times its time.
"""

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Tells glibc to serve all blocks from its heap and never to shrink it; False without glibc.

    Peak memory stays what it was; what is lost is that other processes could use memory that this
    one needs only now and then. Call it where a training program starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
