"""Copies between a GPU and host memory, with the processor in the place of the GPU."""

from typing import Any

import pytest
import torch

from helpers import merged_bits
from lowcomm_node.trainer import gpu
from lowcomm_node.trainer.gpu import Copies, merges_alike
from lowcomm_node.trainer.replica import Replica
from lowcomm_protocol.spec.outer import OuterSettings

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


class Beside(Replica):
    """A replica that copies and merges as on a GPU."""

    rooms = 10**9
    """How many vectors the device has memory for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.copies, self.merges_there = Counted(self), True


class Counted(Copies):
    """Counts what it gives, and has no more than ``rooms``."""

    def __init__(self, replica: Beside) -> None:
        super().__init__(CPU)
        self._replica = replica

    def room(self, numel: int) -> torch.Tensor | None:
        """See Copies."""
        type(self._replica).rooms -= 1
        return super().room(numel) if self._replica.rooms >= 0 else None


@pytest.mark.parametrize("name", ["noloco", "streaming-diloco", "odd numbers"])
def test_exchanges_beside_the_training_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = merged_bits.digest(name)
    monkeypatch.setattr(gpu, "CHUNK", 1000)
    monkeypatch.setattr(merged_bits, "Replica", Beside)
    for rooms in (10**9, 0, 1, 8, 11):  # without memory on the device, in host memory
        monkeypatch.setattr(Beside, "rooms", rooms)
        assert merged_bits.digest(name) == expected, f"{rooms} vectors on the device"
        assert Beside.rooms < rooms, "the device was asked for memory"


def test_a_device_that_merges_otherwise_does_not_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OuterSettings("noloco", 0.7, 0.5, 0.2, "shift", 0.0)
    assert merges_alike(CPU, settings)

    def rounds(*arguments: Any) -> bool:
        arguments[1][4321] += 1e-6
        return True

    monkeypatch.setattr(gpu, "merge", rounds)
    assert not merges_alike(CPU, settings)
