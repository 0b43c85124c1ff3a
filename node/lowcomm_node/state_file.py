"""Named tensors in safetensors files, and the checks on those that strangers send."""

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowcomm_node.errors import CheckpointError

Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor that a state must have, and no others."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_RESERVED = "__metadata__"
"""safetensors keeps something else under this name."""
_HEADER_BYTES_PER_TENSOR = 256
"""Dtype, shape and offsets of one tensor in a header need less than half of this."""


def state_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that the values of ``tensors`` take in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def expected_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a state of the same form as ``tensors`` (which may be on the meta device) must look like."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write_state(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors straight from their memory, without a copy unless one is on a GPU or is not contiguous.

    Raises CheckpointError on what the format can't hold: memory that two names share, a dtype that it lacks.
    """
    if _RESERVED in tensors:
        raise CheckpointError(f"{_RESERVED!r} can't be a tensor's name in {path.name}: give it another.")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} can't hold these tensors ({str(error).strip()}): save copies.") from error


def read_state(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read a file whose digest has been checked. Raises CheckpointError if it is not a safetensors file."""
    try:
        return load_file(path, device=device)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}): remove its checkpoint.") from error


def read_foreign_state(path: Path, expected: Expected, source: str) -> dict[str, Tensor]:
    """Read a file that came from ``source`` over the network.

    Names, shapes and dtypes are read from its header and checked before memory is allocated, then the values.
    Raises CheckpointError if anything differs from ``expected`` or is not finite.
    """
    _check_sizes(path, expected, source)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            found = {name: (tuple(s.get_shape()), _DTYPES.get(s.get_dtype())) for name, s in slices.items()}
            _check_form(found, expected, source)
            tensors = {name: file.get_tensor(name) for name in found}
    except SafetensorError as error:
        raise CheckpointError(
            f"State from {source} is not a whole safetensors file ({error}): ask another peer."
        ) from error
    validate_state(tensors, expected, source)
    return tensors


def validate_state(tensors: Mapping[str, Tensor], expected: Expected, source: str = "this file") -> None:
    """Refuse a state that is not exactly what is expected.

    Raises CheckpointError on a missing or unknown name, another shape or dtype, NaN or infinity.
    """
    _check_form(expected_of(tensors), expected, source)
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise CheckpointError(f"State from {source}: {name} holds NaN or infinity: take it from another source.")


def _check_sizes(path: Path, expected: Expected, source: str) -> None:
    """Check the two lengths that decide how much memory reading the header can take."""
    largest = sum(len(name.encode()) + _HEADER_BYTES_PER_TENSOR for name in expected) + _HEADER_BYTES_PER_TENSOR
    values = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in expected.values())
    with path.open("rb") as file:
        start = file.read(8)
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if header > largest:
        raise CheckpointError(
            f"State from {source} has a header of {header} bytes, at most {largest} are needed: ask another peer."
        )
    size = path.stat().st_size
    if size != 8 + header + values:
        raise CheckpointError(
            f"State from {source} has {size} bytes instead of {8 + header + values}: ask another peer."
        )


def _check_form(
    found: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]], expected: Expected, source: str
) -> None:
    for name in expected.keys() - found.keys():
        raise CheckpointError(f"State from {source} lacks {name}: it belongs to another model; check the run.")
    for name, (shape, dtype) in found.items():
        if name not in expected:
            raise CheckpointError(
                f"State from {source} has {name!r:.80}, which this model lacks: it belongs to another; check the run."
            )
        if (shape, dtype) != expected[name]:
            right_shape, right_dtype = expected[name]
            raise CheckpointError(
                f"State from {source}: {name} is {dtype} {list(shape)} instead of {right_dtype} {list(right_shape)}: "
                "it belongs to another model; check the run."
            )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The extremes tell as much as a mask of all values, and need no memory: NaN spreads to both.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
