"""How the C library keeps memory that was freed.

Contents travel in pieces of a mebibyte, each of which gRPC allocates and frees. glibc gives such
pieces back to the kernel at once and asks for them again, so most of the time goes into page
faults: on a virtual machine with two cores, gRPC moved 186 MB/s at 5.3 s of CPU a GB, and 1040 MB/s
at 1.0 s with these settings (benchmarks/transport.py).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
KEPT = 32 * 1024**2
"""Bytes at the end of a heap that are kept when they are free."""
LARGE = 4 * 1024**2
"""Bytes from which on a piece of memory is the kernel's business again."""


def keep_freed_memory() -> bool:
    """Have this process reuse what it has freed; whether that could be arranged.

    To be called before there are threads.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE) and mallopt(_TRIM_THRESHOLD, KEPT))
