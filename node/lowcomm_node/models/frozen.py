"""Matrices that nobody trains, in 16, 8 or 4 bits, and the low-rank factors that adapt them.

Every peer packs on a processor, from the same files, so all hold the same bits. A product unpacks
its matrix, computes, and forgets it; the backward pass unpacks it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowcomm_node.models.base import as_computed

BLOCK = 64
"""Values with one scale, in fp32: their largest magnitude."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to its largest (QLoRA, 2305.14314, appendix E)."""
INT8 = 127


@dataclass(frozen=True)
class Form:
    """One way to hold a matrix of fp32 values, as codes and scales."""

    bits: float
    """A value, scales included."""
    dtype: torch.dtype
    codes: Callable[[int], int]
    """Number of codes for a number of values."""
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor], Tensor]
    """Values ``[at least as many]`` in fp32, or in bf16 where they are kept so."""


def _blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``[count, BLOCK]`` from -1 to 1, filled up with zeros, and their scales."""
    flat = values.float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    return blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], scales


def _pack_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks, scales = _blocks(values)
    return (blocks * INT8).round().to(torch.int8).flatten(), scales / INT8


def _pack_nf4(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks, scales = _blocks(values)
    levels = torch.tensor(NF4)
    codes = torch.bucketize(blocks, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten()
    return codes[::2] << 4 | codes[1::2], scales


def _unpack_nf4(codes: Tensor, scales: Tensor) -> Tensor:
    levels = torch.tensor(NF4, device=codes.device)
    pairs = torch.cartesian_prod(levels, levels)
    return pairs[codes.int()].view(-1, BLOCK).mul_(scales[:, None])


FORMS = {
    "bf16": Form(
        bits=16,
        dtype=torch.bfloat16,
        codes=lambda count: count,
        pack=lambda values: (values.to(torch.bfloat16).flatten(), torch.empty(0)),
        unpack=lambda codes, _: codes,
    ),
    "int8": Form(
        bits=8 + 32 / BLOCK,
        dtype=torch.int8,
        codes=lambda count: -(-count // BLOCK) * BLOCK,
        pack=_pack_int8,
        unpack=lambda codes, scales: codes.view(-1, BLOCK) * scales[:, None],
    ),
    "nf4": Form(
        bits=4 + 32 / BLOCK,
        dtype=torch.uint8,
        codes=lambda count: -(-count // BLOCK) * BLOCK // 2,
        pack=_pack_nf4,
        unpack=_unpack_nf4,
    ),
}
"""By ``adapter.base``."""


class _Product(torch.autograd.Function):
    """``x W^T``, which keeps neither x nor the unpacked W for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: "FrozenLinear") -> Tensor:
        ctx.linear = linear
        return F.linear(x, linear.matrix(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.linear.matrix(gradients[0].dtype), None


class FrozenLinear(nn.Module):
    """A packed matrix ``[outputs, inputs]``, and the factors B ``[outputs, rank]`` and A
    ``[rank, inputs]`` that adapt it."""

    codes: Tensor
    scales: Tensor
    lora_A: Tensor | None  # noqa: N815 - its name everywhere
    lora_B: nn.Parameter | None  # noqa: N815

    def __init__(self, linear: nn.Module, form: Form, turned: bool) -> None:
        """Take the place of a linear module of the meta device; ``turned``: its weight is
        ``[inputs, outputs]``."""
        super().__init__()
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, Tensor)
        shape = tuple(weight.shape)
        self.outputs, self.inputs = reversed(shape) if turned else shape
        self.form, self.turned = form, turned
        self.register_buffer("codes", torch.empty(form.codes(prod(shape)), dtype=form.dtype))
        scales = -(-prod(shape) // BLOCK) if form.bits < 16 else 0
        self.register_buffer("scales", torch.empty(scales))
        self.bias = bias if isinstance(bias, Tensor) else None
        self.register_buffer("lora_A", None)
        self.register_parameter("lora_B", None)
        self.scaling = self.dropout = 0.0

    def adapt(self, rank: int, alpha: float, dropout: float) -> None:
        """Add factors, whose values are still to be set."""
        self.lora_A = torch.empty(rank, self.inputs)
        self.lora_B = nn.Parameter(torch.empty(self.outputs, rank))
        self.scaling, self.dropout = alpha / rank, dropout

    def take(self, weight: Tensor) -> None:
        """Pack a weight as the file has it."""
        codes, scales = self.form.pack(weight.mT if self.turned else weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The unpacked matrix."""
        values = self.form.unpack(self.codes, self.scales)[: self.outputs * self.inputs]
        return values.view(self.outputs, self.inputs).to(dtype)

    def merged(self) -> Tensor:
        """The weight with its adapter as the unadapted module has it, fp32."""
        whole = self.matrix(torch.float32)
        if self.lora_A is not None and self.lora_B is not None:
            whole = whole + self.scaling * self.lora_B.float() @ self.lora_A.float()
        return whole.mT if self.turned else whole

    def forward(self, x: Tensor) -> Tensor:
        x = as_computed(x)
        y: Tensor = _Product.apply(x, self)  # pyright: ignore[reportAssignmentType]
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if self.lora_A is None or self.lora_B is None:
            return y
        drops = self.dropout and torch.is_grad_enabled()  # in a step, never in a text
        seen = F.dropout(x, self.dropout) if drops else x
        return y + self.scaling * F.linear(F.linear(seen, self.lora_A), self.lora_B)
