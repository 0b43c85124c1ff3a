"""NVIDIA's library with one card or several, of which a test says what it reads."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lowcomm_node.system import accelerator


class FakeCard:
    """What a driver knows of a card."""

    def __init__(self, uuid: str) -> None:
        self.uuid, self.load, self.degrees, self.milliwatts = uuid, 0.5, 60, 250_000
        self.computing: list[int] = []
        self.shares: dict[int, float] = {}


class FakeLibrary(FakeCard):
    """The functions that a node uses; constants and errors are those of the library.

    It is its own first card; ``cards`` takes more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("GPU-1")
        self.cards: list[FakeCard] = [self]
        self.is_root = True
        self.fault: int | None = None
        """Error of the query for the shares of processes."""
        self.calls: dict[str, Any] = {
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByUUID": lambda uuid: self._card(
                [card for card in self.cards if card.uuid == uuid]
            ),
            "nvmlDeviceGetHandleByIndex": lambda place: self._card(self.cards[place:]),
            "nvmlDeviceGetName": lambda _: "Large 9",
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=100 * card.load),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3, total=8),
            "nvmlDeviceGetTemperature": lambda card, sensor: card.degrees,
            "nvmlDeviceGetPowerManagementLimitConstraints": lambda _: [100_000, 300_000],
            "nvmlDeviceGetPowerManagementLimit": lambda card: card.milliwatts,
            "nvmlDeviceSetPowerManagementLimit": self._limit,
            "nvmlDeviceGetComputeRunningProcesses": lambda card: [
                SimpleNamespace(pid=pid) for pid in card.computing
            ],
            "nvmlDeviceGetProcessUtilization": self._shares,
        }
        monkeypatch.setattr(accelerator, "nvml", lambda: self)

    def __getattr__(self, name: str) -> Any:
        is_call = name.startswith("nvml")
        return self.calls[name] if is_call else getattr(pynvml, name)

    def _card(self, found: list[FakeCard]) -> FakeCard:
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]

    def _limit(self, card: FakeCard, milliwatts: int) -> None:
        if not self.is_root:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        card.milliwatts = milliwatts

    def _shares(self, card: FakeCard, since: int) -> list[SimpleNamespace]:
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)
        return [SimpleNamespace(pid=pid, smUtil=int(100 * x)) for pid, x in card.shares.items()]
