"""What must hold for what a node tells of the device that trains: it is that of the driver or of
the kernel, and no driver in trouble holds up or ends a node."""

import os
import threading
from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace

import pynvml
import pytest

from helpers.waiting import until
from lowcomm_node.system.machine import STALE_SECONDS, Accelerator, Gpu, Processor, meter_of


def driver(monkeypatch: pytest.MonkeyPatch, load: Callable[[], float]) -> None:
    """A driver of one GPU."""

    def find(uuid: str) -> str:
        if uuid != "GPU-1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    for name, call in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetName": lambda _: "Large 9",
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=100 * load()),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3, total=8),
    }.items():
        monkeypatch.setattr(pynvml, name, call)


def test_a_driver_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch):
    hanging, looked = threading.Event(), threading.Event()

    def load() -> float:
        if looked.is_set():
            hanging.wait(30)
        looked.set()
        return 0.5

    driver(monkeypatch, load)
    meter = Gpu("GPU-1")
    until(lambda: meter.look(monotonic()).load == 0.5, 30, "its first look")
    assert meter.look(monotonic() + STALE_SECONDS + 1) == Accelerator(kind="gpu", name="Large 9")
    hanging.set()


def test_what_trains_is_what_is_looked_at():
    assert isinstance(meter_of("cpu", "", os.getpid()), Processor)
    assert meter_of("cpu", "", None) is None
    assert meter_of("mps", "", os.getpid()) is None
    meter = meter_of("cuda:0", "GPU-1", os.getpid())
    assert isinstance(meter, Gpu)
