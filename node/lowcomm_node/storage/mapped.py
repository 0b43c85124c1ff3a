"""Vectors in files of the home that are mapped into memory: the kernel writes them out and drops
them where memory is short, and nothing else has to.

They outlive no process. A file goes with its vector; what a killed process left behind goes with
the next start.
"""

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from lowcomm_node.storage.durable import disk_full_error
from lowcomm_protocol.codecs.base import Vector

_PREFIX = ".mapped-"


def sweep(folder: Path) -> None:
    """Make the folder, and remove what a killed process has left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_PREFIX}*"):
        left.unlink(missing_ok=True)


def mapped_vector(folder: Path, numel: int) -> Vector:
    """A vector of zeros in a new file of the folder. Raises DiskFull."""
    size = max(1, numel) * np.dtype(np.float32).itemsize
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        # Without room for it on the disk, writing to the memory would end the process.
        with disk_full_error(folder, size):
            os.posix_fallocate(descriptor, 0, size)
        vector = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.float32)[:numel]
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    weakref.finalize(vector, Path(name).unlink, missing_ok=True)
    return vector
