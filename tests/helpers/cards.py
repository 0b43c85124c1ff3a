"""NVIDIA's library with one card, of which a test says what it reads."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lowcomm_node.system import accelerator


class FakeLibrary:
    """The functions that a node uses; constants and errors are those of the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uuid, self.load, self.degrees = "GPU-1", 0.5, 60
        self.milliwatts, self.is_root = 250_000, True
        self.computing: list[int] = []
        self.shares: dict[int, float] = {}
        self.fault: int | None = None
        """Error of the query for the shares of processes."""
        self.calls: dict[str, Any] = {
            "nvmlDeviceGetHandleByUUID": lambda uuid: self._card(uuid == self.uuid),
            "nvmlDeviceGetHandleByIndex": lambda place: self._card(place == 0),
            "nvmlDeviceGetName": lambda _: "Large 9",
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=100 * self.load),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3, total=8),
            "nvmlDeviceGetTemperature": lambda _, sensor: self.degrees,
            "nvmlDeviceGetPowerManagementLimitConstraints": lambda _: [100_000, 300_000],
            "nvmlDeviceGetPowerManagementLimit": lambda _: self.milliwatts,
            "nvmlDeviceSetPowerManagementLimit": self._limit,
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [
                SimpleNamespace(pid=pid) for pid in self.computing
            ],
            "nvmlDeviceGetProcessUtilization": self._shares,
        }
        monkeypatch.setattr(accelerator, "nvml", lambda: self)

    def __getattr__(self, name: str) -> Any:
        is_call = name.startswith("nvml")
        return self.calls[name] if is_call else getattr(pynvml, name)

    def _card(self, is_there: bool) -> str:
        if not is_there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.uuid

    def _limit(self, card: str, milliwatts: int) -> None:
        if not self.is_root:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        self.milliwatts = milliwatts

    def _shares(self, card: str, since: int) -> list[SimpleNamespace]:
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)
        return [SimpleNamespace(pid=pid, smUtil=int(100 * x)) for pid, x in self.shares.items()]
