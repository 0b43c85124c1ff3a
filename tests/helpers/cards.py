"""NVIDIA's library with one card, of which a test says what it reads."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lowcomm_node.system import accelerator


class FakeLibrary:
    """The functions that a node uses; constants and errors are those of the library."""

    NVMLError = pynvml.NVMLError

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uuid, self.load, self.degrees = "GPU-1", 0.5, 60
        self.milliwatts, self.is_root = 250_000, True
        self.computing: list[int] = []
        self.shares: dict[int, float] = {}
        self.fault: int | None = None
        """Error of the query for the shares of processes."""
        monkeypatch.setattr(accelerator, "nvml", lambda: self)

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        """See NVML."""
        if uuid != self.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetHandleByIndex(self, place: int) -> str:  # noqa: N802
        """See NVML."""
        if place:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.uuid

    def nvmlDeviceGetName(self, card: str) -> str:  # noqa: N802
        """See NVML."""
        return "Large 9"

    def nvmlDeviceGetUtilizationRates(self, card: str) -> SimpleNamespace:  # noqa: N802
        """See NVML."""
        return SimpleNamespace(gpu=100 * self.load)

    def nvmlDeviceGetMemoryInfo(self, card: str) -> SimpleNamespace:  # noqa: N802
        """See NVML."""
        return SimpleNamespace(used=3, total=8)

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[SimpleNamespace]:  # noqa: N802
        """See NVML."""
        return [SimpleNamespace(pid=pid) for pid in self.computing]

    def nvmlDeviceGetProcessUtilization(  # noqa: N802
        self, card: str, since: int
    ) -> list[SimpleNamespace]:
        """See NVML."""
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)
        return [SimpleNamespace(pid=pid, smUtil=int(100 * x)) for pid, x in self.shares.items()]

    def nvmlDeviceGetTemperature(self, card: str, sensor: int) -> int:  # noqa: N802
        """See NVML."""
        return self.degrees

    def nvmlDeviceGetPowerManagementLimitConstraints(self, card: str) -> list[int]:  # noqa: N802
        """See NVML."""
        return [100_000, 300_000]

    def nvmlDeviceGetPowerManagementLimit(self, card: str) -> int:  # noqa: N802
        """See NVML."""
        return self.milliwatts

    def nvmlDeviceSetPowerManagementLimit(self, card: str, milliwatts: int) -> None:  # noqa: N802
        """See NVML."""
        if not self.is_root:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        self.milliwatts = milliwatts
