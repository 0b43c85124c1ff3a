"""Named tensors in safetensors files."""

import math
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowcomm_node.errors import CheckpointError
from lowcomm_node.storage.files import disk_full_error
from lowcomm_protocol.codecs.base import Vector

_RESERVED = "__metadata__"  # safetensors reserves this name
_SYSTEM = re.compile(r"\(os error (\d+)\)")
"""safetensors is written in Rust, and gives the system's error number only in its text."""


def write_state(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors from their memory, without a copy unless one is on a GPU or not contiguous.
    Raises CheckpointError on what the format can't hold, such as shared memory; OSError."""
    if _RESERVED in tensors:
        raise CheckpointError(
            f"{_RESERVED!r} can't be a tensor's name in {path.name}: give it another."
        )
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata)
    except SafetensorError as error:
        if (found := _SYSTEM.search(str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path.name} can't hold these tensors ({str(error).strip()}): save copies."
        ) from error


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite: one pass, without a copy."""
    # Both ends are NaN if any value is.
    return tensor.numel() == 0 or all(math.isfinite(float(end)) for end in tensor.aminmax())


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with NaN or infinity; None if there is none."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


def read_state(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a file whose digest has been checked. Raises CheckpointError."""
    try:
        return load_file(path, device=device)
    except (SafetensorError, OSError) as error:  # a writer may have removed it meanwhile
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): use another checkpoint."
        ) from error


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
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(descriptor, 0, size)
            for start in range(os.fstat(descriptor).st_size, size, 1 << 20):
                os.pwrite(descriptor, bytes(min(1 << 20, size - start)), start)
        vector = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.float32)[:numel]
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    weakref.finalize(vector, Path(name).unlink, missing_ok=True)
    return vector
