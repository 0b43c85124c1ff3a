"""What must hold for the GPU's memory: torch is told the owner's share of it, and nothing where
there is no GPU."""

from types import SimpleNamespace

import pytest
import torch

from lowcomm_node.trainer.memory import GIB, limit_vram


@pytest.mark.parametrize(("gibibytes", "share"), [(6.0, 0.75), (80.0, 1.0)])
def test_torch_is_told_the_share_of_the_memory_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, gibibytes: float, share: float
) -> None:
    told: list[tuple[float, torch.device]] = []
    card = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, device: told.append((part, device)),
    )
    device = torch.device("cuda:1")
    limit_vram(device, gibibytes)
    assert told == [(share, device)]
    limit_vram(device, None)
    limit_vram(torch.device("cpu"), gibibytes)
    assert len(told) == 1
