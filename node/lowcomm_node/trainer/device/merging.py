"""Merges vectors where they are: by loops of the protocol in host memory, by Triton on a GPU.

Both give the same bits: peers of one exchange need not know what the others compute on.
"""

import torch
from torch import Tensor

from lowcomm_protocol.exchange import outer
from lowcomm_protocol.spec.outer import OuterSettings


def merge(
    settings: OuterSettings,
    theta: Tensor,
    phi_new: Tensor,
    theta_captured: Tensor,
    out: Tensor | None = None,
) -> bool:
    """Bring an outer step into the fast weights; whether all is finite.

    Vectors are contiguous float32 of one shape, on one device. Raises PlanError otherwise.
    """
    if theta.device.type == "cpu":
        return outer.merge(settings, theta, phi_new, theta_captured, out)
    from lowcomm_node.trainer.device import merge_kernels

    return merge_kernels.merge(settings, theta, phi_new, theta_captured, out)


def merges_alike(device: torch.device, settings: OuterSettings) -> bool:
    """Whether merges compile for a device, and give there what they give in host memory.

    What differs by a bit on one card, with one release of Triton or of a driver, would go unseen
    and spoil an average of the swarm. So a few thousand values are tried before it is relied on.
    """
    theta, phi, captured = (torch.sin(torch.arange(5000.0) * step) for step in (1.1, 2.3, 3.7))
    captured[::3] = theta[::3]
    expected, there = torch.empty_like(theta), [one.to(device) for one in (theta, phi, captured)]
    outer.merge(settings, theta, phi, captured, expected)
    try:
        merge(settings, *there)
    except Exception:  # Triton raises what its compiler, a linker or a driver raise
        return False
    return torch.equal(there[0].cpu().view(torch.int32), expected.view(torch.int32))
