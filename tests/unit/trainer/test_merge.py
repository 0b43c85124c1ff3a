"""Merges by torch, as a GPU does them, give the bits of those for host memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lowcomm_node.models.devices import choose_device
from lowcomm_node.trainer import gpu
from lowcomm_protocol.exchange import outer as on_host
from lowcomm_protocol.spec.outer import OuterSettings

NUMELS = (1, 7, 255, 256, 257, 1024, 5000)
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-100, -(2.0**-99), 1e-6, 3e38, -3e38, 1.0)
SETTINGS = [
    OuterSettings("nesterov", 0.7, 0.9, 0.0, "shift", 0.0),
    OuterSettings("noloco", 0.7, 0.5, 0.2, "mix", 0.3),
    OuterSettings("noloco", 0.7, 0.5, 0.2, "mix", 0.75),
    OuterSettings("noloco", 1.0, 0.5, 1.0, "shift", 0.0, 0.9),
]


def drawn(numel: int, seed: int, scale: float = 0.02) -> Tensor:
    """Values of all sizes: a few are special, and blocks differ in size."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(numel).astype(np.float32) * np.float32(scale)
    blocks = np.arange(numel) // 256
    values *= np.float32(2.0) ** ((blocks * 7) % 23 - 11).astype(np.float32)
    values[(blocks % 5) == 4] *= np.float32(2.0**-110)
    places = generator.integers(0, numel, size=min(numel, 6))
    values[places] = generator.choice(np.array(SPECIAL[:8], dtype=np.float32), size=places.size)
    return torch.from_numpy(values)


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit; NaN has no one pattern."""
    a, b = one.cpu(), other.cpu()
    bits = torch.equal(a.view(torch.int32), b.view(torch.int32))
    return bits or bool(
        ((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all()
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_merge_gives_the_same_bits_and_sees_what_is_not_finite(settings: OuterSettings) -> None:
    device = choose_device("auto")
    for numel in NUMELS:
        theta, phi = drawn(numel, 1), drawn(numel, 2)
        captured = torch.where(torch.arange(numel) % 3 == 0, theta, drawn(numel, 3))
        for broken in (None, float("nan"), float("inf")):
            if broken is not None:
                phi[numel // 2] = broken
            expected, out = theta.clone(), theta.to(device, copy=True)
            here = gpu.merge(settings, out, phi.to(device), captured.to(device))
            finite = on_host.merge(settings, expected, phi, captured.clone())
            assert here is finite is (broken is None)
            assert same(out, expected)
