"""Copy a fragment's rows out of the tensors of a model, and back.

Apart from ``fragments``, so that counting values needs no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lowcomm_protocol.errors import PlanError
from lowcomm_protocol.plan import Fragment, Slice


@torch.no_grad()
def gather(fragment: Fragment, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Copy a fragment's rows into ``out``: float32 [numel], contiguous; any device.

    Raises `PlanError`, before anything is written, when a tensor is missing or does not fit.
    """
    for rows, part in paired(fragment, tensors, out):
        copy_flat(rows, part)


@torch.no_grad()
def scatter(fragment: Fragment, vector: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy ``vector`` (float32 [numel], contiguous; any device) to a fragment's rows.

    Raises `PlanError` as ``gather`` does.
    """
    for rows, part in paired(fragment, tensors, vector):
        copy_flat(part, rows)


def copy_flat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor into another of its shape; in host memory by NumPy, in half of torch's time."""
    alike = source.dtype == target.dtype and source.is_cpu and target.is_cpu
    if alike and source.is_contiguous() and target.is_contiguous():
        np.copyto(array_of(target), array_of(source))
    else:
        target.copy_(source)


def array_of(tensor: torch.Tensor) -> Any:
    """The same memory for NumPy and kernels: of a tensor in host memory."""
    return tensor.detach().numpy()  # pyright: ignore[reportUnknownMemberType]


def paired(
    fragment: Fragment, tensors: Mapping[str, torch.Tensor], vector: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each slice's rows beside its part of the vector. Raises `PlanError` as ``gather`` does."""
    if (
        vector.dtype != torch.float32
        or vector.shape != (fragment.numel,)
        or not vector.is_contiguous()
    ):
        raise PlanError(
            f"fragment {fragment.index}: a vector of {vector.dtype} and shape "
            f"{tuple(vector.shape)}: pass contiguous float32 of shape ({fragment.numel},)"
        )
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = 0
    for part in fragment.slices:
        rows = _rows(part, tensors)
        pairs.append((rows, vector[start : start + part.numel].view(rows.shape)))
        start += part.numel
    return pairs


def between(
    fragment: Fragment, tensors: Mapping[str, torch.Tensor], start: int, stop: int
) -> Iterator[torch.Tensor]:
    """The values ``[start, stop)`` of a fragment's vector, one tensor's after the other's.

    1-D; views of contiguous tensors. Raises `PlanError` as ``gather`` does.
    """
    at = 0
    for part in fragment.slices:
        first, last = max(start - at, 0), min(stop - at, part.numel)
        if first < last:
            yield _rows(part, tensors).detach().reshape(-1)[first:last]
        at += part.numel


def _rows(part: Slice, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensors.get(part.tensor)
    if tensor is None:
        raise PlanError(
            f"tensor {part.tensor!r} is not in this model: use the model that the plan was made for"
        )
    rows = tensor[part.start : part.stop] if tensor.dim() else tensor.unsqueeze(0)
    if rows.shape[0] != part.stop - part.start or rows.numel() != part.numel:
        raise PlanError(
            f"tensor {part.tensor!r} of shape {tuple(tensor.shape)} has no rows {part.start} to "
            f"{part.stop} with {part.numel} values: use the model that the plan was made for"
        )
    return rows
