"""Moments of the inner optimizer in 16 or 8 bits, as an owner chooses with ``--moments``.

A step unpacks a slice of a weight's moments, computes in fp32, and packs it again. It rounds up or
down by chance, so that changes smaller than a code add up. The draws depend on the step and the
weight alone: a resumed node draws the same. Checkpoints and joiners get fp32, which packs to the
same codes.

int8 keeps blocks of 256 codes and their largest magnitude (8-bit optimizers, 2110.02861), and of
squares the roots, which vary less. No root is rounded to zero: a step divides by it.
"""

from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
BITS = {"fp32": 32, "bf16": 16, "int8": 8 + 32 / BLOCK}
"""A value, scales included, by ``--moments``."""
SLICE = 1 << 22
"""Values that are unpacked at once; whole blocks."""
VECTORS = 6
"""Vectors in fp32 of a slice while it is unpacked, moved and packed."""
TINY = 1e-15
"""Blocks whose largest magnitude is below it count as zero: AdamW adds more to the root."""


def slices(weight: Tensor) -> Iterator[slice]:
    """Ranges of the values of a weight."""
    for start in range(0, weight.numel(), SLICE):
        yield slice(start, min(start + SLICE, weight.numel()))


def generator_of(device: torch.device, step: int, weight: int, start: int) -> torch.Generator:
    """Draws for the slice of a weight that begins at ``start``, in one step."""
    seed = crc32(f"{step}:{weight}:{start}".encode())
    return torch.Generator(device).manual_seed(seed)


class Packed:
    """One moment of one weight, zero at first."""

    def __init__(self, weight: Tensor, form: str, squares: bool = False) -> None:
        """``squares``: whether it is AdamW's second moment, which is never negative."""
        count, int8 = weight.numel(), form == "int8"
        self.shape, self._squares = weight.shape, squares
        dtype = (torch.uint8 if squares else torch.int8) if int8 else torch.bfloat16
        self.codes = torch.zeros(count, dtype=dtype, device=weight.device)
        self.scales = torch.zeros(-(-count // BLOCK) if int8 else 0, device=weight.device)

    def whole(self) -> Tensor:
        """All values, in host memory."""
        return torch.cat([self.read(these).cpu() for these in slices(self.codes)]).view(self.shape)

    def take(self, values: Tensor) -> None:
        """Replace all values, to the nearest codes."""
        flat = values.reshape(-1)
        for these in slices(self.codes):
            self.write(these, flat[these].to(self.codes.device))

    def read(self, these: slice) -> Tensor:
        """Values of a slice, flat, fp32."""
        if self.codes.dtype == torch.bfloat16:
            return self.codes[these].float()
        codes, count = _in_blocks(self.codes[these].float()), these.stop - these.start
        roots = codes.div_(self._levels).mul_(self.scales[_blocks_of(these), None]).view(-1)[:count]
        return roots.square_() if self._squares else roots

    def write(
        self,
        these: slice,
        values: Tensor,
        draws: torch.Generator | None = None,
        unless: Tensor | None = None,
    ) -> None:
        """Replace a slice; nothing if ``unless``, a value of the device, is true. Without ``draws``
        round to nearest."""
        if self.codes.dtype == torch.bfloat16:
            codes = values.to(torch.bfloat16) if draws is None else _rounded(values, draws)
            _put(self.codes[these], codes, unless)
            return
        blocks = _in_blocks(values.sqrt() if self._squares else values)
        scales = blocks.abs().amax(dim=1)
        scales = torch.where(scales < TINY, 0.0, scales)
        codes = (blocks / scales.clamp(min=TINY)[:, None]).mul_(self._levels)
        codes.add_(0.5 if draws is None else _drawn(blocks, draws)).floor_().clamp_(
            max=self._levels
        )
        if self._squares:
            codes.clamp_(min=1).mul_((blocks > 0) & (scales > 0)[:, None])
        _put(self.codes[these], codes.view(-1)[: len(values)].to(self.codes.dtype), unless)
        _put(self.scales[_blocks_of(these)], scales, unless)

    @property
    def _levels(self) -> int:
        return 255 if self._squares else 127


def zeros(weight: Tensor, form: str, squares: bool = False) -> Tensor | Packed:
    """A moment before the first step."""
    return torch.zeros_like(weight) if form == "fp32" else Packed(weight, form, squares)


def _blocks_of(these: slice) -> slice:
    return slice(these.start // BLOCK, -(-these.stop // BLOCK))


def _in_blocks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def _drawn(like: Tensor, draws: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=draws, device=like.device)


def _rounded(values: Tensor, draws: torch.Generator) -> Tensor:
    """In bf16, which is the upper half of fp32: what the lower half is of its range is the chance
    to round away from zero."""
    lower = torch.randint(
        1 << 16, values.shape, generator=draws, dtype=torch.int32, device=values.device
    )
    bits = values.contiguous().view(torch.int32) + lower
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _put(place: Tensor, values: Tensor, unless: Tensor | None) -> None:
    place.copy_(values if unless is None else torch.where(unless, place, values))
