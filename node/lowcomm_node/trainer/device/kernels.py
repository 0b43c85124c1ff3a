"""Which kernels compute with a vector: those of the device that it is on.

    outer_of(theta).merge(settings, theta, phi, captured)
    blocks_of(theta).encode("int8", theta, out)

Vectors in host memory go to the compiled loops of the protocol, others to Triton kernels. Both
write the same bytes and give the same bits: peers of one exchange need not know what the others
compute on. ``modulo.py`` does the same for what `ModuloCoder` codes in host memory.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from lowcomm_protocol.codecs import codec
from lowcomm_protocol.spec.outer_settings import OuterSettings


class Outer(Protocol):
    """The arithmetic between capture and merge; see ``exchange/outer.py``."""

    def contribution(
        self, settings: OuterSettings, phi: Tensor, theta: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """What a peer sends."""
        ...

    def mean_contribution(
        self,
        contributions: Sequence[Tensor],
        weights: Sequence[float] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Mean of the contributions."""
        ...

    def outer_step(
        self,
        settings: OuterSettings,
        phi: Tensor,
        delta: Tensor,
        mean_c: Tensor,
        progress: Tensor | None = None,
        own_decoded: Tensor | None = None,
    ) -> None:
        """One outer step, in place on ``phi`` and ``delta``."""
        ...

    def merge(
        self,
        settings: OuterSettings,
        theta: Tensor,
        phi_new: Tensor,
        theta_captured: Tensor,
        out: Tensor | None = None,
    ) -> bool:
        """Bring an outer step into the fast weights; whether all is finite."""
        ...

    def worst_block_spread(self, vectors: Sequence[Tensor]) -> float:
        """Standard deviation across vectors in the block where that is largest."""
        ...

    def square_apart(self, vector: Tensor, base: Tensor, pull: float) -> float:
        """The squared norm of ``vector - pull * base``."""
        ...


class Blocks(Protocol):
    """Codecs of blocks: int8, e3m0 and q2."""

    def encode(self, name: str, vector: Tensor, out: Tensor) -> None:
        """Code float32 ``vector`` into uint8 ``out``. Raises CodecError if it is not finite."""
        ...

    def decode(self, name: str, data: Tensor, out: Tensor) -> None:
        """Decode uint8 ``data`` into ``out``.

        Raises CodecError, before it writes, for what no encoder writes.
        """
        ...


class _HostBlocks:
    """The codecs of the protocol."""

    def encode(self, name: str, vector: Tensor, out: Tensor) -> None:
        """See Blocks."""
        codec(name).encode(vector.numpy(), out.numpy().data)

    def decode(self, name: str, data: Tensor, out: Tensor) -> None:
        """See Blocks."""
        codec(name).decode(data.numpy().data, out.numpy())


def outer_of(vector: Tensor) -> Outer:
    """The outer step for vectors that are where this one is."""
    if vector.device.type == "cpu":
        from lowcomm_protocol.exchange import outer
    else:
        from lowcomm_node.trainer.device import outer
    return cast("Outer", outer)


def blocks_of(vector: Tensor) -> Blocks:
    """The codecs of blocks for vectors that are where this one is."""
    if vector.device.type == "cpu":
        return _HostBlocks()
    from lowcomm_node.trainer.device import blocks

    return cast("Blocks", blocks)


def merges_alike(device: torch.device, settings: OuterSettings) -> bool:
    """Whether merges compile for a device, and give there what they give in host memory.

    What differs by a bit on one card, with one release of Triton or of a driver, would go unseen
    and spoil an average of the swarm. So a few thousand values are tried before it is relied on.
    """
    theta, phi, captured = (torch.sin(torch.arange(5000.0) * step) for step in (1.1, 2.3, 3.7))
    captured[::3] = theta[::3]
    expected, there = torch.empty_like(theta), [one.to(device) for one in (theta, phi, captured)]
    outer_of(theta).merge(settings, theta, phi, captured, expected)
    try:
        outer_of(there[0]).merge(settings, *there)
    except Exception:  # Triton raises what its compiler, a linker or a driver raise
        return False
    return torch.equal(there[0].cpu().view(torch.int32), expected.view(torch.int32))
