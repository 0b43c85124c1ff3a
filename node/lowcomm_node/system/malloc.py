"""Settings of the C library for freed memory.

Contents travel in pieces of a mebibyte, each of which gRPC allocates and frees. glibc returns such
pieces to the kernel at once and asks for them again, so most of the time goes into page faults: on
a virtual machine with two cores, gRPC moved 186 MB/s at 5.3 s of CPU per GB, and 1040 MB/s at 1.0 s
with these settings (benchmarks/transport.py).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
KEPT = 32 * 1024**2
"""Free bytes at the end of a heap that are kept."""
LARGE = 4 * 1024**2
"""Bytes of an allocation above which the kernel maps it separately."""


def keep_freed_memory() -> bool:
    """Have this process reuse freed memory. Returns whether that worked.

    Call it before threads exist.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE) and mallopt(_TRIM_THRESHOLD, KEPT))
